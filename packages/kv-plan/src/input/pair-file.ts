import { KV_CACHE_KINDS, KV_CACHE_LAYOUTS, KvError } from "@kv/interface";
import type { RankGeometry } from "@kv/plan";
import { unknownKeys } from "@kv/program/unknown-keys";
import { z } from "zod";
import { describeIssues, regionSchema, stateSpaceSchema } from "../data/plan-document.js";
import { MAX_RANKS, type Pair, placeRegions, type UnplacedRank } from "./pair.js";

type UnplacedRegion = UnplacedRank["regions"][number];

const upTo = (most: number) => z.int().min(1).max(most);
const count = upTo(2 ** 20);

/** A region without an address gets a free one. */
const region = regionSchema
  .partial({ baseAddress: true, blockStrideBytes: true, groupId: true, memoryType: true })
  .extend({
    stage: z
      .int()
      .min(0)
      .max(MAX_RANKS - 1)
      .default(0),
  });
const engine = z
  .strictObject({
    tpSize: upTo(MAX_RANKS),
    ppSize: upTo(MAX_RANKS).default(1),
    dcpSize: upTo(MAX_RANKS).optional(),
    kernelBlockSize: count,
    physicalBlocksPerLogical: count.default(1),
    layout: z.enum(KV_CACHE_LAYOUTS).default("LBHNC"),
    attentionBackend: z.string().min(1).max(200),
    stateSpace: stateSpaceSchema.optional(),
    groupBlockTokens: z
      .array(upTo(2 ** 31))
      .max(1024)
      .optional(),
    regions: z.array(region).min(1).max(65_536),
  })
  .superRefine(({ tpSize, ppSize, regions }, context) => {
    const refuse = (path: (string | number)[], message: string) =>
      context.addIssue({ code: "custom", path, message });
    if (tpSize * ppSize > MAX_RANKS)
      refuse(
        ["tpSize"],
        `${tpSize} × ${ppSize} stages (ppSize) are ${tpSize * ppSize} ranks, more than ${MAX_RANKS}`,
      );
    const held = new Set(regions.map(({ stage }) => stage));
    for (const [index, { stage }] of regions.entries())
      if (stage >= ppSize)
        refuse(["regions", index, "stage"], `stage ${stage} of ${ppSize} (ppSize), counted from 0`);
    for (let stage = 0; stage < ppSize; stage++)
      if (!held.has(stage)) refuse(["regions"], `stage ${stage} of ${ppSize} has none`);
  });
const schema = z.strictObject({
  version: z.literal(1),
  title: z.string().max(200).default("pair"),
  numKvHeads: count,
  groupKvHeads: z.array(count).max(1024).optional(),
  groups: z.array(z.enum(KV_CACHE_KINDS)).min(1).max(1024),
  cacheDtype: z.string().min(1).max(100).optional(),
  windowTokens: z.array(z.int().min(1).nullable()).max(1024).default([]),
  prefill: engine,
  decode: engine,
});

/**
 * Reads the file of `kv-plan --file`.
 * @throws `KV_CONFIG_INVALID` with the field.
 */
export function pairFromFile(name: string, value: unknown): Pair {
  const parsed = schema.safeParse(value, { error: unknownKeys });
  if (!parsed.success) {
    throw new KvError("KV_CONFIG_INVALID", `${name}: ${describeIssues(parsed.error)}`, {
      hint: "docs/kv-plan.md describes the file",
    });
  }
  const { title, numKvHeads, groupKvHeads, groups, cacheDtype, windowTokens, prefill, decode } =
    parsed.data;
  return {
    title,
    plannedFrom: `the file ${name}`,
    numKvHeads,
    groupKvHeads,
    groups,
    cacheDtype,
    windowTokens: groups.map((_, index) => windowTokens[index] ?? undefined),
    prefill: ranksOf(prefill),
    decode: ranksOf(decode),
    assumed: [],
  };
}

function ranksOf({
  tpSize,
  ppSize,
  dcpSize,
  regions,
  ...facts
}: z.infer<typeof engine>): RankGeometry[] {
  return Array.from({ length: ppSize * tpSize }, (_, index) => {
    const [ppRank, tpRank] = [Math.floor(index / tpSize), index % tpSize];
    return placeRegions({
      ...facts,
      tpRank,
      tpSize,
      ...(ppSize === 1 ? {} : { ppRank, ppSize }),
      dcpSize,
      deviceId: tpRank,
      regions: regions.filter(({ stage }) => stage === ppRank).map(regionOf),
    });
  });
}

function regionOf({ stage: _, ...given }: z.infer<typeof region>): UnplacedRegion {
  return {
    ...(given as UnplacedRegion),
    blockStrideBytes: given.blockStrideBytes ?? given.blockLengthBytes,
    groupId: given.groupId ?? 0,
    memoryType: given.memoryType ?? "VRAM",
  };
}
