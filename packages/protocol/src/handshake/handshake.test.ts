import { expect, test } from "vitest";
import {
  decodeHandshakePayload,
  decodeHandshakeReply,
  decodeHandshakeRequest,
  encodeHandshakePayload,
  encodeHandshakeReply,
  encodeMsgpack,
} from "../index.js";

const marker = new TextEncoder().encode("get_meta_msg");
const malformed = expect.objectContaining({ code: "KV_WIRE_MALFORMED" });
const payload = {
  compatibilityHash: "ab".repeat(32),
  agentMetadataBytes: Uint8Array.of(1),
  rest: {},
};

test.each<[string, unknown]>([
  ["a marker that is a string", ["get_meta_msg", 0, 0]],
  ["another marker", [new TextEncoder().encode("get_meta_msh"), 0, 0]],
  ["a longer marker", [new TextEncoder().encode("get_meta_msg\0"), 0, 0]],
  ["no ranks", [marker]],
  ["an extra element", [marker, 0, 0, 0]],
  ["a negative rank", [marker, 0, -1]],
  ["a rank above 65535", [marker, 0, 65_536]],
  ["a rank that is a string", [marker, "0", 0]],
  ["a map", { marker: 1 }],
])("a request with %s is refused", (_, message) => {
  expect(() => decodeHandshakeRequest([encodeMsgpack(message)])).toThrow(malformed);
});

test("a request is exactly one frame of limited size", () => {
  const good = encodeMsgpack([marker, 0, 3]);
  expect(decodeHandshakeRequest([good])).toEqual({ ppRank: 0, tpRank: 3 });
  expect(() => decodeHandshakeRequest([])).toThrow(malformed);
  expect(() => decodeHandshakeRequest([good, good])).toThrow(malformed);
  expect(() => decodeHandshakeRequest([new Uint8Array(2000)])).toThrow(
    expect.objectContaining({ code: "KV_WIRE_LIMIT_EXCEEDED" }),
  );
});

test("our extension and unknown fields of a later vLLM decode to what was encoded", () => {
  const full = { ...payload, extension: { version: 1, features: ["x"] }, rest: { later: [1] } };
  expect(decodeHandshakePayload(encodeHandshakePayload(full))).toEqual(full);
  expect(decodeHandshakePayload(encodeHandshakePayload(payload))).toEqual(payload);
});

test.each([
  ["compatibility_hash", 5],
  ["agent_metadata_bytes", "text"],
  ["kv_extension", [1]],
])("a reply with %s = %j is refused, and the error names the field", (name, value) => {
  const map = { compatibility_hash: "ab", agent_metadata_bytes: Uint8Array.of(1), [name]: value };
  expect(() => decodeHandshakePayload(encodeMsgpack(map))).toThrow(malformed);
  expect(() => decodeHandshakePayload(encodeMsgpack(map))).toThrow(name);
});

test("a reply's clock is a number of seconds, and peers before connector version 5 send none", () => {
  const [first, clock] = encodeHandshakeReply(encodeHandshakePayload(payload), 12);
  expect(clock[0]).toBe(0xcb);
  expect(decodeHandshakeReply([first, clock]).clockSeconds).toBe(12);
  expect(decodeHandshakeReply([first]).clockSeconds).toBeUndefined();
  for (const bad of [
    encodeMsgpack("12"),
    encodeMsgpack(null),
    Buffer.from("cb7ff8000000000000", "hex"),
  ])
    expect(() => decodeHandshakeReply([first, bad])).toThrow(malformed);
  expect(() => decodeHandshakeReply([])).toThrow(malformed);
  expect(() => decodeHandshakeReply([first, clock, clock])).toThrow(malformed);
});
