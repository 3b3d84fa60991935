import { KV_CACHE_LAYOUTS } from "@kv/interface";
import { z } from "zod";
import type { RankGeometry } from "../geometry/rank-geometry.js";

/** Exact in a JavaScript number. */
const whole = z.int().min(0);
const positive = z.int().min(1);

/** Members that may be left out are left out of the parsed value too, and are not `undefined` in it. */
type Present<T> = { [K in keyof T]: Exclude<T[K], undefined> };

export const regionSchema = z.strictObject({
  name: z.string().min(1).max(1000),
  baseAddress: whole,
  numBlocks: positive,
  blockLengthBytes: positive,
  blockStrideBytes: positive,
  groupId: z.int().min(-1),
  memoryType: z.enum(["DRAM", "VRAM"]),
  groupIds: z.array(whole).max(65_536).optional(),
  numKvHeads: positive.optional(),
  replicated: z.boolean().optional(),
  members: z.array(z.string().max(1000)).max(65_536).optional(),
  deviceId: whole.optional(),
});

const stateSpaceSchema = z.strictObject({
  convProjectionBytes: z.array(whole).max(1024).optional(),
  convBytes: whole,
  recurrentBytes: whole,
});

export const rankSchema = z.strictObject({
  tpRank: whole,
  tpSize: positive,
  dcpSize: positive.default(1),
  kernelBlockSize: positive,
  physicalBlocksPerLogical: positive,
  layout: z.enum(KV_CACHE_LAYOUTS),
  attentionBackend: z.string().max(1000),
  deviceId: whole,
  regions: z.array(regionSchema).max(65_536),
  ppRank: whole.optional(),
  ppSize: positive.optional(),
  stateSpace: stateSpaceSchema.optional(),
  packedMembers: z
    .record(z.string().max(1000), z.strictObject({ offsetBytes: whole, lengthBytes: positive }))
    .optional(),
  groupBlockTokens: z.array(positive).max(65_536).optional(),
});

/** A rank as the schema leaves it: zod writes no member that was not there. */
export function rankOf(parsed: z.infer<typeof rankSchema>): RankGeometry {
  return parsed as Present<typeof parsed> as RankGeometry;
}
