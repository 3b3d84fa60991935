import { DESCRIPTOR_ROW } from "@kv/interface";
import { z } from "zod";
import { rankSchema } from "./geometry-schema.js";

/** Of `PlanDocument`. It grows when a reader of the one before would misread a document. */
export const PLAN_DOCUMENT_VERSION = 1;

const whole = z.int().min(0);
const positive = z.int().min(1);
const ranks = z.array(whole).max(65_536);

const table = z.strictObject({
  memoryType: z.enum(["DRAM", "VRAM"]),
  /** Rows `[address, lengthBytes, deviceId, strideBytes, count]`. */
  rows: z.array(z.array(whole).length(DESCRIPTOR_ROW)).max(1_000_000),
});

const indexing = z.strictObject({ offset: whole, count: whole, blockStep: whole, partStep: whole });
const numbers = z.array(whole).max(65_536);
/** Kinds are open: whoever reads a plan of a kind that it does not know cannot plan requests with it, and says so then. */
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

/** A plan as plain JSON: everything that it decides, its tables written out. */
export type PlanDocument = z.infer<typeof planDocumentSchema>;
