import { KV_CACHE_LAYOUTS } from "@kv/interface";
import { z } from "zod";
import type { RankGeometry, RegionGeometry } from "../geometry.js";

/** Exact in a JavaScript number. */
const whole = z.int().min(0);
const positive = z.int().min(1);

export const regionSchema = z.strictObject({
  name: z.string().min(1).max(1000),
  baseAddress: whole,
  numBlocks: positive,
  blockLengthBytes: positive,
  blockStrideBytes: positive,
  groupId: z.int().min(-1),
  memoryType: z.enum(["DRAM", "VRAM"]),
}) satisfies z.ZodType<RegionGeometry>;

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
}) satisfies z.ZodType<RankGeometry>;
