import { DESCRIPTOR_ROW, KV_CACHE_LAYOUTS } from "@kv/interface";
import { z } from "zod";

/** Version of `PlanDocument`. It grows when a reader of the version before would misread a document. */
export const PLAN_DOCUMENT_VERSION = 1;

/** An integer that a number holds exactly. */
const whole = z.int().min(0);
const positive = z.int().min(1);

/** `RegionGeometry`. */
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
  cellBytes: positive.optional(),
  replicated: z.boolean().optional(),
  members: z.array(z.string().max(1000)).max(65_536).optional(),
  deviceId: whole.optional(),
});

/** `StateSpaceGeometry`. */
export const stateSpaceSchema = z.strictObject({
  convProjectionBytes: z.array(whole).max(1024).optional(),
  convBytes: whole,
  recurrentBytes: whole,
});

/** `RankGeometry`. */
const rankSchema = z.strictObject({
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

const ranks = z.array(whole).max(65_536);

const table = z.strictObject({
  memoryType: z.enum(["DRAM", "VRAM"]),
  /** Rows `[address, lengthBytes, deviceId, strideBytes, count]`. */
  rows: z.array(z.array(whole).length(DESCRIPTOR_ROW)).max(1_000_000),
});

const indexing = z.strictObject({ offset: whole, count: whole, blockStep: whole, partStep: whole });
const numbers = z.array(whole).max(65_536);
/** Kinds are open: a plan with an unknown kind can be read, and `planRequest` works on its extent. */
const kind = z.string().min(1).max(100);
const unit = z.enum(["kernel-block", "logical-block"]);

const segment = z.strictObject({
  region: whole,
  remoteRegion: whole,
  piece: z.string().max(1000),
  unit,
  localParts: positive,
  remoteParts: positive,
  list: whole,
  lengthBytes: positive,
});

const groupPlan = z.strictObject({
  kind,
  extent: z.enum(["sequence", "window", "state", "whole"]),
  unit,
  localBlockTokens: positive,
  remoteBlockTokens: positive,
  partTokens: positive,
  localParts: positive,
  remoteParts: positive,
  localPerLogical: positive,
  remotePerLogical: positive,
  segments: numbers,
  sharedHeads: positive.optional(),
});

/** The zod schema of `PlanDocument`. */
export const planDocumentSchema = z.strictObject({
  version: z.literal(PLAN_DOCUMENT_VERSION),
  form: z.enum(["copy", "permute", "direct"]),
  formReason: z.string().max(10_000),
  blockSizeRatio: positive,
  remoteParts: positive,
  groups: z.array(kind).max(65_536),
  mapping: z.strictObject({
    sourceRanksPerGroup: z.array(ranks).max(65_536),
    attentionRanks: ranks,
    allSourceRanks: ranks,
    rankToAttentionSlot: z.record(z.string().regex(/^\d{1,6}$/), whole),
    rankOffsetFactor: whole,
    localConsumers: positive,
    handshakeRanks: ranks,
    notifyOnlyRanks: ranks,
  }),
  local: rankSchema,
  remote: rankSchema,
  sources: z
    .array(
      z.strictObject({
        remoteRank: whole,
        remotePpRank: whole,
        groups: numbers,
        segments: numbers,
        remoteIndexing: z.array(indexing).max(65_536),
        lists: z
          .array(
            z.strictObject({ localListKey: z.string().max(10_000), localTable: table, remoteTable: table }),
          )
          .min(1)
          .max(16),
      }),
    )
    .max(65_536),
  localConsumers: positive,
  notifyOnlyRanks: ranks,
  conversions: z.array(z.enum(["attention-order", "hnd-to-nhd"])),
  localHeads: positive,
  blockOrder: z.enum(["head-major", "token-major", "opaque"]),
  uncovered: z.enum(["zeroed", "masked"]),
  segments: z.array(segment).max(65_536),
  groupPlans: z.array(groupPlan).max(65_536),
  localIndexing: z.array(indexing).max(65_536),
  remoteIndexing: z.array(indexing).max(65_536),
  regionsOfGroup: z.array(numbers).max(65_536),
  headsOfRegion: numbers,
  stages: numbers,
});

/** A plan as plain JSON, with its tables. */
export type PlanDocument = z.infer<typeof planDocumentSchema>;

const MOST_ISSUE_CHARACTERS = 300;

/** The first three faults that a schema finds, each with its place in the document. */
export function describeIssues(error: z.ZodError): string {
  const shown = error.issues.slice(0, 3).map((issue) => {
    const place = issue.path.length === 0 ? "the document" : issue.path.join(".");
    const text = `${place}: ${issue.message}`;
    // Both may contain names of members, which the document chooses.
    return text.length <= MOST_ISSUE_CHARACTERS ? text : `${text.slice(0, MOST_ISSUE_CHARACTERS)}…`;
  });
  const more = error.issues.length - shown.length;
  return shown.join("; ") + (more > 0 ? `; and ${more} more` : "");
}
