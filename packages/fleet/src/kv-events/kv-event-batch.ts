import { KvError } from "@kv/interface";
import { decodeMsgpackInSteps, type MsgpackLimits } from "@kv/protocol";
import type { SubscriptionLimits } from "@kv/side-channel";

export type KvEvent =
  | ({ readonly type: "stored" } & StoredBlocks)
  | ({ readonly type: "removed" } & RemovedBlocks)
  | { readonly type: "cleared" };

/** A KV cache group of an event. */
export interface CacheGroup {
  readonly index: number;
  /**
   * Tokens that must be cached before a position to compute from there: all, or fewer for layers
   * with a sliding window or a state.
   */
  readonly needs: "all" | number;
}

/** Blocks that an engine has cached, one after another. */
export interface StoredBlocks {
  readonly hashes: readonly string[];
  /** Undefined at the start of a prompt. */
  readonly parent: string | undefined;
  /**
   * Token ids of all blocks. If there are more than the blocks hold, vLLM left blocks out (as for
   * sliding windows), and only another group tells their places.
   */
  readonly tokens: ArrayLike<number>;
  readonly blockSize: number;
  /** For each block, the later tokens that its hash covers (vLLM 0.33 with speculative layers). */
  readonly lookahead?: readonly ArrayLike<number>[] | undefined;
  readonly group: CacheGroup;
}

/** Blocks that an engine has cached no more. */
export interface RemovedBlocks {
  readonly hashes: readonly string[];
  readonly group: number;
}

type Fields = Readonly<Record<string, unknown>>;
type Reading<T> = Generator<undefined, T>;

const MAX_BATCH_BYTES = 16 * 1024 * 1024;

export const SUBSCRIPTION_LIMITS: SubscriptionLimits = {
  maxFrames: 8,
  maxMessageBytes: MAX_BATCH_BYTES + 64 * 1024,
  greetingTimeoutMs: 5000,
};
const MAX_GROUP = 1023;
const MAX_VALUES = 2_000_000;
const LIMITS: MsgpackLimits = {
  maxBytes: MAX_BATCH_BYTES,
  maxDepth: 8,
  maxItems: MAX_VALUES,
  maxValues: MAX_VALUES,
  maxTextBytes: 64 * 1024,
  // vLLM's hashes are 64-bit integers, unless it publishes bytes.
  bigIntegers: true,
  int32Lists: true,
};
/** vLLM's hashes have 8 or 32 bytes. */
const MAX_HASH_BYTES = 128;
const STEP_ITEMS = 1000;

/**
 * Decodes a payload of vLLM's KV event publisher (0.32 and 0.33, `vllm/distributed/kv_events.py`):
 * `[time, events, data_parallel_rank]`, where each event has a `type`. It skips other types, LoRA
 * adapters, blocks with extra keys (images, salts), and media other than the engine's memory.
 * Yields an event, or undefined after a step. Events before a malformed one are valid.
 *
 * @throws `KV_WIRE_MALFORMED`; `KV_WIRE_LIMIT_EXCEEDED` above 16 MiB, two million values, or eight
 * levels.
 */
export function* readKvEventBatch(payload: Uint8Array): Generator<KvEvent | undefined, void> {
  const batch = yield* decodeMsgpackInSteps(payload, "a batch of KV events", LIMITS);
  try {
    if (!Array.isArray(batch) || !Array.isArray(batch[1]))
      throw new Error("it is no list with a list of events");
    for (const value of batch[1] as unknown[]) yield yield* readEvent(value);
  } catch (cause) {
    throw KvError.from(cause, "KV_WIRE_MALFORMED", "a batch of KV events cannot be decoded");
  }
}

// Schemas are too slow for many engines with a hundred batches a second.
function* readEvent(value: unknown): Reading<KvEvent | undefined> {
  const event = (typeof value === "object" && value !== null ? value : {}) as Fields;
  if (event["type"] === "AllBlocksCleared") return { type: "cleared" };
  if (event["type"] === "BlockRemoved") {
    const removed = { hashes: yield* hashesIn(event), group: groupIn(event) };
    return isOwnMemory(event["medium"]) ? { type: "removed", ...removed } : undefined;
  }
  return event["type"] === "BlockStored" ? yield* readStored(event) : undefined;
}

function* readStored(event: Fields): Reading<KvEvent | undefined> {
  const hashes = yield* hashesIn(event);
  const { parent_block_hash: parent, block_size: blockSize, extra_keys: keys } = event;
  const parentText = parent == null ? undefined : hashText(parent, "parent_block_hash is no hash");
  const tokens = yield* tokensIn(event);
  if (!isCount(blockSize) || blockSize < 1) throw new Error("block_size is not a positive integer");
  if (tokens.length < hashes.length * blockSize)
    throw new Error(`${hashes.length} blocks of ${blockSize} tokens have ${tokens.length} tokens`);
  const lookahead = event["lookahead_token_ids"] ?? undefined;
  if (lookahead !== undefined && !(Array.isArray(lookahead) && lookahead.every(isTokenIds)))
    throw new Error("lookahead_token_ids are not lists of integers");
  const isKeyed =
    event["lora_name"] != null || (isList(keys) && keys.some((key: unknown) => key != null));
  const group = { index: groupIn(event), needs: needsOf(event) };
  if (isKeyed || !isOwnMemory(event["medium"])) return undefined;
  return {
    type: "stored",
    hashes,
    parent: parentText,
    tokens,
    blockSize,
    lookahead,
    group,
  };
}

function* hashesIn({ block_hashes: hashes }: Fields): Reading<string[]> {
  if (!isList(hashes)) throw new Error("block_hashes is no list");
  const texts: string[] = [];
  for (const [at, hash] of hashes.entries()) {
    if (at > 0 && at % STEP_ITEMS === 0) yield;
    texts.push(hashText(hash, "block_hashes is no list of hashes"));
  }
  return texts;
}

function* tokensIn({ token_ids: tokens }: Fields): Reading<ArrayLike<number>> {
  if (tokens instanceof Int32Array) return tokens;
  if (!Array.isArray(tokens)) throw new Error("token_ids are not integers");
  for (let at = 0; at < tokens.length; at += STEP_ITEMS) {
    if (at > 0) yield;
    if (!isTokenIds(tokens.slice(at, at + STEP_ITEMS)))
      throw new Error("token_ids are not integers");
  }
  return tokens as readonly number[];
}

function isList(value: unknown): value is readonly unknown[] | Int32Array {
  return Array.isArray(value) || value instanceof Int32Array;
}

function groupIn({ group_idx: index }: Fields): number {
  if (index == null) return 0;
  if (!isCount(index) || index > MAX_GROUP)
    throw new Error(`group_idx is not an integer up to ${MAX_GROUP}`);
  return index;
}

function isOwnMemory(medium: unknown): boolean {
  return medium == null || medium === "GPU";
}

/** Unknown kinds count as full attention, which never promises too much. */
function needsOf({
  kv_cache_spec_kind: kind,
  kv_cache_spec_sliding_window: window,
}: Fields): CacheGroup["needs"] {
  if (kind === "mamba") return 1;
  return kind === "sliding_window" && isCount(window) && window > 0 ? window - 1 : "all";
}

/** Throws `why` for another value than a number or some bytes. */
function hashText(hash: unknown, why: string): string {
  if (typeof hash === "number" || typeof hash === "bigint") return String(hash);
  if (hash instanceof Uint8Array && hash.byteLength <= MAX_HASH_BYTES)
    return Buffer.from(hash.buffer, hash.byteOffset, hash.byteLength).toString("base64");
  throw new Error(why);
}

function isCount(value: unknown): value is number {
  return Number.isSafeInteger(value) && (value as number) >= 0;
}

function isTokenIds(value: unknown): value is ArrayLike<number> {
  return value instanceof Int32Array || (Array.isArray(value) && value.every(Number.isSafeInteger));
}
