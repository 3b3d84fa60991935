import { KvError } from "@kv/interface";
import { encodeMsgpack } from "@kv/protocol";
import { describe, expect, it, test } from "vitest";
import { decodeMessage, encodeMessage, type TierMessage } from "./messages.js";

const key = new Uint8Array(36).fill(7);
const MESSAGES: readonly TierMessage[] = [
  {
    type: "connect",
    peer_id: "127.0.0.1:5710",
    agent_metadata: new Uint8Array(300),
    base_addr: 2 ** 46,
    num_blocks: 64,
    block_len: 65_536,
    config_fingerprint: "6357ff6e9f34c0a7",
    hash_seed: "vllm",
  },
  { type: "connect_ack", peer_id: "host-a:5711" },
  { type: "disconnect" },
  { type: "lookup", kv_request_id: "r", keys: [key, key], round_seq: 1 },
  { type: "lookup_resp", kv_request_id: "r", keys: [key], hits: [true] },
  { type: "fetch", kv_request_id: "r", keys: [key], block_indexes: [3], round_seq: 0 },
  { type: "transfer_done", kv_request_id: "r", success: false, round_seq: 0 },
  { type: "abort_fetch", kv_request_id: "r", round_seq: 0 },
  { type: "abort_ack", kv_request_id: "r", round_seq: 0 },
];

describe.each(MESSAGES.map((message) => [message.type, message] as const))("%s", (_, message) => {
  const bytes = encodeMessage(message);

  it("comes back as it was sent", () => {
    expect(decodeMessage(bytes)).toEqual(message);
  });

  it("is refused when it is cut at any byte", () => {
    for (let length = 0; length < bytes.length; length += 1)
      expect(() => decodeMessage(bytes.subarray(0, length)), `${length} bytes`).toThrow(KvError);
  });

  it("is refused without any of its fields", () => {
    for (const field of Object.keys(message)) {
      const { [field as "type"]: _left, ...rest } = message;
      expect(() => decodeMessage(encodeMsgpack(rest)), field).toThrow(KvError);
    }
  });
});

test.each([
  ["keys and blocks of unequal number", { ...MESSAGES[5], block_indexes: [1, 2] }],
  ["keys and hits of unequal number", { ...MESSAGES[4], hits: [] }],
  ["a negative block", { ...MESSAGES[5], block_indexes: [-1] }],
  ["a fraction of a round", { ...MESSAGES[5], round_seq: 0.5 }],
  ["a key without a hash", { ...MESSAGES[3], keys: [new Uint8Array(4)] }],
  ["a key that is a text", { ...MESSAGES[3], keys: ["abcdefgh"] }],
  ["a name without a port", { ...MESSAGES[1], peer_id: "host" }],
  ["an empty fingerprint", { ...MESSAGES[0], config_fingerprint: "" }],
  ["blocks of no bytes", { ...MESSAGES[0], block_len: 0 }],
  ["a list", [1]],
])("refuses %s", (_, message) => {
  expect(() => decodeMessage(encodeMsgpack(message))).toThrow(
    expect.objectContaining({ code: "KV_WIRE_MALFORMED" }),
  );
});
