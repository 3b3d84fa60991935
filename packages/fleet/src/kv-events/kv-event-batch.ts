import { KvError } from "@kv/interface";
import { checkMsgpackHeaders, type MsgpackLimits } from "@kv/protocol";
import type { SubscriptionLimits } from "@kv/side-channel";
import { decode } from "@msgpack/msgpack";
import type { RemovedBlocks, StoredBlocks } from "./block-index.js";

/** A change of an instance's prefix cache. */
export type KvEvent =
  | ({ readonly type: "stored" } & StoredBlocks)
  | ({ readonly type: "removed" } & RemovedBlocks)
  | { readonly type: "cleared" };

/** Layers that have their blocks in common. */
export interface CacheGroup {
  readonly index: number;
  /**
   * What must be cached before a position from which the rest is computed: all tokens, or this number of tokens before it, as in layers with a sliding window and in
   * layers with a state.
   */
  readonly needs: "all" | number;
}

type Fields = Readonly<Record<string, unknown>>;

/** Largest batch that is decoded. */
const MAX_BATCH_BYTES = 16 * 1024 * 1024;

/** What a publisher may send, also to those who ask for a replay. */
export const SUBSCRIPTION_LIMITS: SubscriptionLimits = {
  maxFrames: 8,
  /** A batch, its sequence number and its topic. */
  maxMessageBytes: MAX_BATCH_BYTES + 64 * 1024,
  greetingTimeoutMs: 5000,
};
/** Largest index of a KV cache group. */
const MAX_GROUP = 1023;
/** A few bytes can announce a list of 2^32, for which the decoder would allocate memory. */
const LIMITS: MsgpackLimits = { maxBytes: MAX_BATCH_BYTES, maxDepth: 8, maxItems: 1_000_000 };

/**
 * Decodes a payload of vLLM's KV event publisher (0.32 and 0.33, `vllm/distributed/kv_events.py`): `[time, events, data_parallel_rank]`,
 * where each event is a map with its `type`. Events of other types, of LoRA adapters, of blocks with extra keys (images, salts)
 * and of other media than the engine's own memory are left out. Errors: `KV_WIRE_MALFORMED`, `KV_WIRE_LIMIT_EXCEEDED` above 16 MiB, a million items in
 * a list, or eight levels.
 */
export function readKvEventBatch(payload: Uint8Array): readonly KvEvent[] {
  if (payload.byteLength > MAX_BATCH_BYTES) {
    const message = `a batch of KV events has ${payload.byteLength} bytes; the limit is ${MAX_BATCH_BYTES}`;
    throw new KvError("KV_WIRE_LIMIT_EXCEEDED", message);
  }
  checkMsgpackHeaders(payload, "a batch of KV events", LIMITS);
  try {
    const batch = decode(payload, { useBigInt64: false });
    if (!Array.isArray(batch) || !Array.isArray(batch[1]))
      throw new Error("it is no list with a list of events");
    return (batch[1] as unknown[]).flatMap(readEvent);
  } catch (cause) {
    throw new KvError("KV_WIRE_MALFORMED", `a batch of KV events cannot be decoded: ${reasonOf(cause)}`, {
      cause,
    });
  }
}

// Checked by hand and not by schemas: an engine sends a hundred batches a second, and a router follows many engines.
function readEvent(value: unknown): KvEvent[] {
  const event = (typeof value === "object" && value !== null ? value : {}) as Fields;
  if (event["type"] === "AllBlocksCleared") return [{ type: "cleared" }];
  if (event["type"] === "BlockRemoved") {
    const removed = { hashes: hashesIn(event), group: groupIn(event) };
    return isOwnMemory(event["medium"]) ? [{ type: "removed", ...removed }] : [];
  }
  return event["type"] === "BlockStored" ? readStored(event) : [];
}

function readStored(event: Fields): KvEvent[] {
  const hashes = hashesIn(event);
  const { parent_block_hash: parent, token_ids: tokens, block_size: blockSize, extra_keys: keys } = event;
  if (parent != null && !isHash(parent)) throw new Error("parent_block_hash is no hash");
  if (!isTokenIds(tokens)) throw new Error("token_ids are not integers");
  if (!isCount(blockSize) || blockSize < 1) throw new Error("block_size is not a positive integer");
  if (tokens.length < hashes.length * blockSize)
    throw new Error(`${hashes.length} blocks of ${blockSize} tokens have ${tokens.length} tokens`);
  const lookahead = event["lookahead_token_ids"] ?? undefined;
  if (lookahead !== undefined && !(Array.isArray(lookahead) && lookahead.every(isTokenIds)))
    throw new Error("lookahead_token_ids are not lists of integers");
  const isKeyed = event["lora_name"] != null || (Array.isArray(keys) && keys.some((key) => key != null));
  const group = { index: groupIn(event), needs: needsOf(event) };
  if (isKeyed || !isOwnMemory(event["medium"])) return [];
  return [
    {
      type: "stored",
      hashes,
      parent: parent == null ? undefined : hashText(parent),
      tokens,
      blockSize,
      lookahead,
      group,
    },
  ];
}

function hashesIn({ block_hashes: hashes }: Fields): string[] {
  if (!Array.isArray(hashes) || !hashes.every(isHash)) throw new Error("block_hashes is no list of hashes");
  return hashes.map(hashText);
}

function groupIn({ group_idx: index }: Fields): number {
  if (index == null) return 0;
  if (!isCount(index) || index > MAX_GROUP) throw new Error(`group_idx is not an integer up to ${MAX_GROUP}`);
  return index;
}

function isOwnMemory(medium: unknown): boolean {
  return medium == null || medium === "GPU";
}

/** Kinds that are not known count as full attention, which never promises more than there is. */
function needsOf({
  kv_cache_spec_kind: kind,
  kv_cache_spec_sliding_window: window,
}: Fields): CacheGroup["needs"] {
  if (kind === "mamba") return 1;
  return kind === "sliding_window" && isCount(window) && window > 0 ? window - 1 : "all";
}

type Hash = Uint8Array | number | bigint;

function isHash(value: unknown): value is Hash {
  return value instanceof Uint8Array || typeof value === "number" || typeof value === "bigint";
}

function hashText(hash: Hash): string {
  if (!(hash instanceof Uint8Array)) return String(hash);
  return Buffer.from(hash.buffer, hash.byteOffset, hash.byteLength).toString("base64");
}

function isCount(value: unknown): value is number {
  return Number.isSafeInteger(value) && (value as number) >= 0;
}

function isTokenIds(value: unknown): value is number[] {
  return Array.isArray(value) && value.every(Number.isSafeInteger);
}

function reasonOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
