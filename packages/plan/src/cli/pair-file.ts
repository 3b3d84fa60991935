import { KV_CACHE_KINDS, KV_CACHE_LAYOUTS, KvError } from "@kv/interface";
import { z } from "zod";
import { regionSchema } from "../data/geometry-schema.js";
import { describeIssues } from "../data/issues.js";
import type { RankGeometry } from "../geometry.js";
import type { Pair } from "./pair.js";
import { placeRegions } from "./place-regions.js";

/** A region that does not say where it is lies where nothing else does. */
const region = regionSchema.partial({
  baseAddress: true,
  blockStrideBytes: true,
  groupId: true,
  memoryType: true,
});
const engine = z.strictObject({
  tpSize: z.int().min(1).max(4096),
  dcpSize: z.int().min(1).max(4096).optional(),
  kernelBlockSize: z
    .int()
    .min(1)
    .max(2 ** 20),
  physicalBlocksPerLogical: z
    .int()
    .min(1)
    .max(2 ** 20)
    .default(1),
  layout: z.enum(KV_CACHE_LAYOUTS).default("LBHNC"),
  attentionBackend: z.string().min(1).max(200),
  regions: z.array(region).min(1).max(65_536),
});
const schema = z.strictObject({
  version: z.literal(1),
  title: z.string().max(200).default("pair"),
  numKvHeads: z
    .int()
    .min(1)
    .max(2 ** 20),
  groups: z.array(z.enum(KV_CACHE_KINDS)).min(1).max(1024),
  windowTokens: z.array(z.int().min(1).nullable()).max(1024).default([]),
  prefill: engine,
  decode: engine,
});

/** Reads the file of `kv-plan --file`. Errors: `KV_CONFIG_INVALID` naming the field. */
export function pairFromFile(name: string, value: unknown): Pair {
  const parsed = schema.safeParse(value);
  if (!parsed.success) {
    throw new KvError("KV_CONFIG_INVALID", `${name}: ${describeIssues(parsed.error)}`, {
      hint: "docs/kv-plan.md describes the file",
    });
  }
  const { title, numKvHeads, groups, windowTokens, prefill, decode } = parsed.data;
  return {
    title,
    numKvHeads,
    groups,
    windowTokens: groups.map((_, index) => windowTokens[index] ?? undefined),
    prefill: ranksOf(prefill),
    decode: ranksOf(decode),
    assumed: [],
  };
}

function ranksOf(given: z.infer<typeof engine>): RankGeometry[] {
  return Array.from({ length: given.tpSize }, (_, tpRank) =>
    placeRegions({
      tpRank,
      tpSize: given.tpSize,
      ...(given.dcpSize === undefined ? {} : { dcpSize: given.dcpSize }),
      kernelBlockSize: given.kernelBlockSize,
      physicalBlocksPerLogical: given.physicalBlocksPerLogical,
      layout: given.layout,
      attentionBackend: given.attentionBackend,
      deviceId: tpRank,
      regions: given.regions.map((one) => ({
        name: one.name,
        baseAddress: one.baseAddress,
        numBlocks: one.numBlocks,
        blockLengthBytes: one.blockLengthBytes,
        blockStrideBytes: one.blockStrideBytes ?? one.blockLengthBytes,
        groupId: one.groupId ?? 0,
        memoryType: one.memoryType ?? "VRAM",
      })),
    }),
  );
}
