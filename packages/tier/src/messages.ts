import { KvError } from "@kv/interface";
import { decodeMsgpack, encodeMsgpack, type MsgpackLimits } from "@kv/protocol";
import { z } from "zod";

/**
 * vLLM 0.33's P2P messages (`vllm/v1/kv_offload/tiering/p2p/session/protocol.py`): one msgpack map
 * each, without a version.
 */

/** A message of vLLM has the blocks of one request or step. */
const MAX_KEYS = 65_536;

export const MESSAGE_LIMITS: MsgpackLimits = {
  maxBytes: 8 * 2 ** 20,
  maxDepth: 3,
  maxItems: MAX_KEYS,
  maxTextBytes: 2 ** 20,
};

const requestId = z.string().max(512);
const count = z.number().int().nonnegative();
const roundSeq = count.max(2 ** 31);
/** A hash, then the KV cache group in four bytes. */
const key = z
  .instanceof(Uint8Array<ArrayBuffer>)
  .refine(({ length }) => length > 4 && length <= 128);
const keys = z.array(key).max(MAX_KEYS);
const peerId = z.string().regex(/^[\w.:[\]-]{1,255}:\d{1,5}$/);

/** Must be equal on both sides: blocks travel as bytes, named by hashes. */
const namespace = {
  block_len: count.positive(),
  /** vLLM's SHA-256 prefix of the model's configuration. */
  config_fingerprint: z.string().min(1).max(128),
  /** The first input of block hashes: `PYTHONHASHSEED`, or vLLM's own value. */
  hash_seed: z.string().max(1024),
};

const messages = z.discriminatedUnion("type", [
  z.object({
    type: z.literal("connect"),
    peer_id: peerId,
    agent_metadata: z.instanceof(Uint8Array<ArrayBuffer>).refine(({ length }) => length <= 2 ** 20),
    base_addr: count,
    num_blocks: count.positive().max(2 ** 31 - 1),
    ...namespace,
  }),
  z.object({ type: z.literal("connect_ack"), peer_id: peerId }),
  z.object({ type: z.literal("disconnect") }),
  z.object({ type: z.literal("lookup"), kv_request_id: requestId, keys, round_seq: roundSeq }),
  z
    .object({
      type: z.literal("lookup_resp"),
      kv_request_id: requestId,
      keys,
      hits: z.array(z.boolean()).max(MAX_KEYS),
      // Only for `greeting`, which this project adds.
      block_len: namespace.block_len.optional(),
      config_fingerprint: namespace.config_fingerprint.optional(),
      hash_seed: namespace.hash_seed.optional(),
    })
    .refine(({ keys, hits }) => keys.length === hits.length, "keys and hits differ in length"),
  z
    .object({
      type: z.literal("fetch"),
      kv_request_id: requestId,
      keys,
      block_indexes: z.array(count).max(MAX_KEYS),
      round_seq: roundSeq,
    })
    .refine(
      ({ keys, block_indexes }) => keys.length === block_indexes.length,
      "keys and block_indexes differ in length",
    ),
  z.object({
    type: z.literal("transfer_done"),
    kv_request_id: requestId,
    success: z.boolean(),
    round_seq: roundSeq,
  }),
  z.object({ type: z.literal("abort_fetch"), kv_request_id: requestId, round_seq: roundSeq }),
  z.object({ type: z.literal("abort_ack"), kv_request_id: requestId, round_seq: roundSeq }),
]);

/** A message of the P2P tier, with vLLM's names. */
export type TierMessage = z.infer<typeof messages>;

export type MessageOf<Type extends TierMessage["type"]> = Extract<TierMessage, { type: Type }>;

/** A test compares them with vLLM's. */
export const MESSAGE_FIELDS: Readonly<Record<TierMessage["type"], readonly string[]>> =
  Object.fromEntries(
    messages.options.map((option) => {
      const { type, ...fields } = option.shape;
      return [type.value, Object.keys(fields)];
    }),
  ) as Record<TierMessage["type"], string[]>;

export function encodeMessage(message: TierMessage): Uint8Array {
  return encodeMsgpack(message);
}

/** @throws `KV_WIRE_MALFORMED` with the field, `KV_WIRE_LIMIT_EXCEEDED`. */
export function decodeMessage(bytes: Uint8Array): TierMessage {
  const decoded = decodeMsgpack(bytes, "P2P message", MESSAGE_LIMITS);
  const { success, data, error } = messages.safeParse(decoded);
  if (success) return data;
  const [issue] = error.issues;
  throw new KvError(
    "KV_WIRE_MALFORMED",
    `P2P message: ${issue?.path.join(".") || "the message"}: ${issue?.message}`,
    { hint: "the peer does not speak the P2P tier of vLLM 0.33" },
  );
}

/** A block's key as text, for maps. */
export const nameOf = (key: Uint8Array): string => Buffer.from(key).toString("base64");
