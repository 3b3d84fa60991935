import { KvError } from "@kv/interface";
import { checkMsgpackHeaders, type MsgpackLimits } from "@kv/protocol";
import { decode } from "@msgpack/msgpack";
import { z } from "zod";
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
   * What must be cached before a position from which the rest is computed: all tokens, or so many before it, as in layers with a sliding window and in
   * layers with a state.
   */
  readonly needs: "all" | number;
}

type Hash = Uint8Array | number | bigint;
const isHash = (value: unknown): value is Hash =>
  value instanceof Uint8Array || typeof value === "number" || typeof value === "bigint";
const hashText = (value: Hash) =>
  value instanceof Uint8Array ? Buffer.from(value).toString("base64") : String(value);
const hash = z.custom<Hash>(isHash).transform(hashText);
// One check for a whole list: a schema per entry would report each of a million wrong ones.
const hashes = z
  .custom<Hash[]>((value) => Array.isArray(value) && value.every(isHash))
  .transform((list) => list.map(hashText));
const tokenIds = z.custom<number[]>((value) => Array.isArray(value) && value.every(Number.isSafeInteger));
const groupIndex = z.number().int().min(0).max(1023).nullish();
const storedSchema = z.object({
  type: z.literal("BlockStored"),
  block_hashes: hashes,
  parent_block_hash: hash.nullable(),
  token_ids: tokenIds,
  block_size: z.number().int().positive(),
  lora_name: z.string().nullish(),
  extra_keys: z.array(z.unknown()).nullish(),
  lookahead_token_ids: z.array(tokenIds).nullish(),
  medium: z.string().nullish(),
  group_idx: groupIndex,
  kv_cache_spec_kind: z.string().nullish(),
  kv_cache_spec_sliding_window: z.number().int().positive().nullish(),
});
const removedSchema = z.object({
  type: z.literal("BlockRemoved"),
  block_hashes: hashes,
  medium: z.string().nullish(),
  group_idx: groupIndex,
});
const clearedSchema = z.object({ type: z.literal("AllBlocksCleared") });
const batchSchema = z.tuple([z.number(), z.array(z.unknown())], z.unknown());

/** Largest batch that is decoded. */
export const MAX_BATCH_BYTES = 16 * 1024 * 1024;
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
    const [, events] = batchSchema.parse(decode(payload, { useBigInt64: false }));
    return events.flatMap(readEvent);
  } catch (cause) {
    throw new KvError("KV_WIRE_MALFORMED", "a batch of KV events cannot be decoded", { cause });
  }
}

function readEvent(event: unknown): KvEvent[] {
  const { type } = (event ?? {}) as { type?: unknown };
  if (type === "AllBlocksCleared") return [{ ...clearedSchema.parse(event), type: "cleared" }];
  if (type === "BlockRemoved") {
    const removed = removedSchema.parse(event);
    if (!isOwnMemory(removed.medium)) return [];
    return [{ type: "removed", hashes: removed.block_hashes, group: removed.group_idx ?? 0 }];
  }
  if (type !== "BlockStored") return [];
  const stored = storedSchema.parse(event);
  const keyed = stored.lora_name != null || stored.extra_keys?.some((keys) => keys != null) === true;
  if (keyed || !isOwnMemory(stored.medium)) return [];
  const { block_hashes: blocks, token_ids: tokens, block_size: blockSize } = stored;
  if (tokens.length < blocks.length * blockSize)
    throw new Error(`${blocks.length} blocks of ${blockSize} tokens have ${tokens.length} tokens`);
  return [
    {
      type: "stored",
      hashes: blocks,
      parent: stored.parent_block_hash ?? undefined,
      tokens,
      blockSize,
      lookahead: stored.lookahead_token_ids ?? undefined,
      group: {
        index: stored.group_idx ?? 0,
        needs: needsOf(stored.kv_cache_spec_kind, stored.kv_cache_spec_sliding_window),
      },
    },
  ];
}

function isOwnMemory(medium: string | null | undefined): boolean {
  return medium == null || medium === "GPU";
}

/** Kinds that are not known count as full attention, which never promises more than there is. */
function needsOf(kind: string | null | undefined, window: number | null | undefined): CacheGroup["needs"] {
  if (kind === "mamba") return 1;
  return kind === "sliding_window" && window != null ? window - 1 : "all";
}
