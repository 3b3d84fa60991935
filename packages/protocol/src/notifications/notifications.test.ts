import { expect, test } from "vitest";
import {
  decodeDone,
  decodeNotification,
  decodePushRegistration,
  encodeNotification,
  encodePushRegistration,
  encodeRequestControl,
  isWireSafeRequestId,
  type KvNotification,
  newCapability,
} from "../index.js";

const bytes = (text: string) => new TextEncoder().encode(text);
const malformed = expect.objectContaining({ code: "KV_WIRE_MALFORMED" });

test.each<[string, KvNotification]>([
  ["cmpl-1:2", { kind: "done", requestId: "cmpl-1", readers: 2 }],
  ["a:b:c:16", { kind: "done", requestId: "a:b:c", readers: 16 }],
  ["HB:a,b", { kind: "heartbeat", requestIds: ["a", "b"] }],
  ["HB:", { kind: "heartbeat", requestIds: [] }],
])("%s decodes and encodes to the same text", (text, notification) => {
  expect(decodeNotification(bytes(text))).toEqual(notification);
  expect(new TextDecoder().decode(encodeNotification(notification))).toBe(text);
});

test.each([
  "",
  ":",
  ":1",
  "a:",
  "a",
  "a:0",
  "a:-1",
  "a:1.0",
  "a:1e3",
  "a: 1",
  "a:9999999",
  `${"x".repeat(513)}:1`,
  "KV1:",
  "KV1:x",
  "PUSH_REG:",
  "PUSH_REG:\u0001",
])("refuses %j as malformed", (text) => {
  expect(() => decodeNotification(bytes(text))).toThrow(malformed);
});

test("bytes that are not UTF-8 are refused, and shown in hex", () => {
  expect(() => decodeNotification(Uint8Array.of(0x61, 0xff, 0x3a, 0x31))).toThrow("61ff3a31");
});

test("refuses notifications and request ids beyond the size limits", () => {
  const limit = expect.objectContaining({ code: "KV_WIRE_LIMIT_EXCEEDED" });
  expect(() => decodeNotification(new Uint8Array(5 * 2 ** 20))).toThrow(limit);
  expect(() => decodeNotification(bytes(`HB:${"a,".repeat(100_001)}`))).toThrow(limit);
  expect(() => decodeNotification(bytes(`HB:a,${"x".repeat(513)}`))).toThrow(malformed);
});

test("extension notifications of our peers are a map with a type", () => {
  const own: KvNotification = {
    kind: "extension",
    message: { type: "lease-lost", request_ids: ["a"] },
  };
  const encoded = encodeNotification(own);
  expect(new TextDecoder().decode(encoded.subarray(0, 4))).toBe("KV1:");
  expect(decodeNotification(encoded)).toEqual(own);
  const untyped = encodeNotification({ kind: "extension", message: { type: 5 } as never });
  expect(() => decodeNotification(untyped)).toThrow(malformed);
});

const registration = {
  requestId: "cmpl-1-0-95daee69",
  decodeEngineId: "d0",
  decodeHost: "127.0.0.1",
  decodePort: 5601,
  decodeTpSize: 2,
  localBlockIds: [[1, 2], [7]],
  remoteEngineId: "p0",
  remoteHost: "127.0.0.1",
  remotePort: 5610,
  remoteTpSize: 1,
  remotePpSize: 1,
  rest: { later: true },
};

test("a push registration decodes to what was encoded, with its unknown keys", () => {
  const notification: KvNotification = {
    kind: "push-registration",
    registration: encodePushRegistration(registration),
  };
  const decoded = decodeNotification(encodeNotification(notification));
  expect(
    decoded.kind === "push-registration" && decodePushRegistration(decoded.registration),
  ).toEqual(registration);
});

test.each([
  ["request_id", null],
  ["decode_port", 0],
  ["decode_tp_size", "2"],
  ["local_block_ids", []],
  ["local_block_ids", [[1], []]],
  ["local_block_ids", [[-1]]],
  ["local_block_ids", [1]],
  ["remote_port", 70_000],
])("a push registration with %s = %j is refused, and the error names the key", (name, value) => {
  const map = { ...encodePushRegistration(registration), [name]: value };
  expect(() => decodePushRegistration(map)).toThrow(malformed);
  expect(() => decodePushRegistration(map)).toThrow(name);
});

test.each(["HB:a", "KV1:x", "PUSH_REG:x", "a,b", ""])(
  "request id %j is not wire-safe",
  (requestId) => {
    expect(isWireSafeRequestId(requestId)).toBe(false);
  },
);

test.each(["cmpl-1-0-92dff6c0", "a:b", "hb:a", "x HB:"])(
  "request id %j is wire-safe",
  (requestId) => {
    expect(isWireSafeRequestId(requestId)).toBe(true);
    const done = encodeNotification({ kind: "done", requestId, readers: 2 });
    expect(decodeNotification(done)).toEqual({ kind: "done", requestId, readers: 2 });
    const heartbeat = encodeNotification({ kind: "heartbeat", requestIds: [requestId] });
    expect(decodeNotification(heartbeat)).toEqual({ kind: "heartbeat", requestIds: [requestId] });
  },
);

test("field.md P1: decodeDone reads both forms of a reader's notification, and nothing else", () => {
  const capability = newCapability();
  const proven = encodeRequestControl({ kind: "done", requestId: "a:b", readers: 2, capability });
  expect(decodeDone(proven)).toMatchObject({ requestId: "a:b", readers: 2 });
  expect(decodeDone(bytes("a:b:2"))).toMatchObject({ requestId: "a:b", readers: 2 });
  const beat = encodeRequestControl({
    kind: "heartbeat",
    requests: [{ requestId: "a", capability }],
  });
  for (const other of [
    beat,
    bytes("HB:a"),
    bytes("PUSH_REG:"),
    bytes("KV1:"),
    bytes("a"),
    new Uint8Array(0),
  ])
    expect(decodeDone(other)).toBeUndefined();
});
