import { KvError } from "@kv/interface";
import { decodeMsgpackInSteps, type MsgpackLimits } from "@kv/protocol";
import type { SubscriptionLimits } from "@kv/side-channel";

/** A change of an instance's prefix cache. */
export type KvEvent =
  | ({ readonly type: "stored" } & StoredBlocks)
  | ({ readonly type: "removed" } & RemovedBlocks)
  | { readonly type: "cleared" };

/** Layers that have their blocks in common. */
export interface CacheGroup {
  readonly index: number;
  /**
   * What must be cached before a position from which the rest is computed: all tokens, or this
   * number of tokens before it, as in layers with a sliding window and in layers with a state.
   */
  readonly needs: "all" | number;
}

/** A run of blocks that an instance has stored in its prefix cache. */
export interface StoredBlocks {
  /** vLLM's hashes of the blocks, as text. */
  readonly hashes: readonly string[];
  /** Hash of the block before the first; undefined where the run begins a prompt. */
  readonly parent: string | undefined;
  /**
   * Token ids of all blocks, in order. Where they are more than the blocks have, blocks were left
   * out (vLLM does so in groups with a sliding window), and the hashes do not say which: the place
   * of such a block is known from another group.
   */
  readonly tokens: ArrayLike<number>;
  /** Tokens in a block. */
  readonly blockSize: number;
  /**
   * Of each block, the tokens after it that its hash covers too (vLLM 0.33 with speculative
   * layers). Absent: none.
   */
  readonly lookahead?: readonly ArrayLike<number>[] | undefined;
  readonly group: CacheGroup;
}

/** Blocks that were evicted. */
export interface RemovedBlocks {
  readonly hashes: readonly string[];
  readonly group: number;
}

type Fields = Readonly<Record<string, unknown>>;

/** Reads a value in steps. */
type Reading<T> = Generator<undefined, T>;

/** Largest batch that is decoded. */
const MAX_BATCH_BYTES = 16 * 1024 * 1024;

/** What a publisher may send, also to those who ask for a replay. */
export const SUBSCRIPTION_LIMITS: SubscriptionLimits = {
  maxFrames: 8,
  maxMessageBytes: MAX_BATCH_BYTES + 64 * 1024,
  greetingTimeoutMs: 5000,
};
/** Largest index of a KV cache group. */
const MAX_GROUP = 1023;
const MAX_VALUES = 2_000_000;
const LIMITS: MsgpackLimits = {
  maxBytes: MAX_BATCH_BYTES,
  maxDepth: 8,
  maxItems: MAX_VALUES,
  maxValues: MAX_VALUES,
  maxTextBytes: 64 * 1024,
  // vLLM's hashes are integers of 64 bits, unless it is told to publish bytes.
  bigIntegers: true,
  int32Lists: true,
};
/** vLLM's hashes have 8 or 32 bytes. */
const MAX_HASH_BYTES = 128;
/** Hashes or tokens that are checked in one step. */
const STEP_ITEMS = 1000;

/**
 * Decodes a payload of vLLM's KV event publisher (0.32 and 0.33, `vllm/distributed/kv_events.py`):
 * `[time, events, data_parallel_rank]`, where each event is a map with its `type`. Events of other
 * types, of LoRA adapters, of blocks with extra keys (images, salts) and of other media than the
 * engine's own memory are left out. Yields an event, or undefined after a step. The events before a
 * malformed one are valid.
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
    throw new KvError(
      "KV_WIRE_MALFORMED",
      `a batch of KV events cannot be decoded: ${reasonOf(cause)}`,
      {
        cause,
      },
    );
  }
}

// Checked by hand and not by schemas: an engine sends a hundred batches a second, and a router
// follows many engines.
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
  if (parent != null && !isHash(parent)) throw new Error("parent_block_hash is no hash");
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
    parent: parent == null ? undefined : hashText(parent),
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
    if (!isHash(hash)) throw new Error("block_hashes is no list of hashes");
    texts.push(hashText(hash));
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

/** A long list of integers is an `Int32Array`. */
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
  if (value instanceof Uint8Array) return value.byteLength <= MAX_HASH_BYTES;
  return typeof value === "number" || typeof value === "bigint";
}

function hashText(hash: Hash): string {
  if (!(hash instanceof Uint8Array)) return String(hash);
  return Buffer.from(hash.buffer, hash.byteOffset, hash.byteLength).toString("base64");
}

function isCount(value: unknown): value is number {
  return Number.isSafeInteger(value) && (value as number) >= 0;
}

function isTokenIds(value: unknown): value is ArrayLike<number> {
  return value instanceof Int32Array || (Array.isArray(value) && value.every(Number.isSafeInteger));
}

function reasonOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
