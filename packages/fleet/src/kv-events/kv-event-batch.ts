import { KvError } from "@kv/interface";
import { decode } from "@msgpack/msgpack";
import { z } from "zod";
import type { StoredBlocks } from "./block-index.js";

/** A change of an instance's prefix cache. */
export type KvEvent =
  | ({ readonly type: "stored" } & StoredBlocks)
  | { readonly type: "removed"; readonly hashes: readonly string[] }
  | { readonly type: "cleared" };

const hash = z
  .union([z.instanceof(Uint8Array), z.number(), z.bigint()])
  .transform((value) =>
    value instanceof Uint8Array ? Buffer.from(value).toString("base64") : String(value),
  );
const storedSchema = z.object({
  type: z.literal("BlockStored"),
  block_hashes: z.array(hash),
  parent_block_hash: hash.nullable(),
  token_ids: z.array(z.number().int()),
  block_size: z.number().int().positive(),
  lora_name: z.string().nullish(),
  extra_keys: z.array(z.unknown()).nullish(),
  group_idx: z.number().int().nullish(),
});
const removedSchema = z.object({
  type: z.literal("BlockRemoved"),
  block_hashes: z.array(hash),
  group_idx: z.number().int().nullish(),
});
const clearedSchema = z.object({ type: z.literal("AllBlocksCleared") });
const batchSchema = z.tuple([z.number(), z.array(z.unknown())], z.unknown());

/** Largest batch that is decoded. */
export const MAX_BATCH_BYTES = 16 * 1024 * 1024;

/**
 * Decodes a payload of vLLM's KV event publisher (0.32 and 0.33, `vllm/distributed/kv_events.py`): `[time, events, data_parallel_rank]`,
 * where each event is a map with its `type`. Events of other types, of LoRA adapters, of blocks with extra keys (images, salts)
 * and of all KV cache groups except the first are left out. Errors: `KV_WIRE_MALFORMED`, `KV_WIRE_LIMIT_EXCEEDED` above 16 MiB.
 */
export function readKvEventBatch(payload: Uint8Array): readonly KvEvent[] {
  if (payload.byteLength > MAX_BATCH_BYTES) {
    const message = `a batch of KV events has ${payload.byteLength} bytes; the limit is ${MAX_BATCH_BYTES}`;
    throw new KvError("KV_WIRE_LIMIT_EXCEEDED", message);
  }
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
    const { block_hashes: hashes } = removedSchema.parse(event);
    return [{ type: "removed", hashes }];
  }
  if (type !== "BlockStored") return [];
  const stored = storedSchema.parse(event);
  const keyed = stored.lora_name != null || stored.extra_keys?.some((keys) => keys != null) === true;
  if (keyed || (stored.group_idx ?? 0) !== 0) return [];
  return [
    {
      type: "stored",
      hashes: stored.block_hashes,
      parent: stored.parent_block_hash ?? undefined,
      tokens: stored.token_ids,
      blockSize: stored.block_size,
    },
  ];
}
