import { DESCRIPTOR_ROW, KV_CACHE_KINDS } from "@kv/interface";
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

export const planDocumentSchema = z.strictObject({
  version: z.literal(PLAN_DOCUMENT_VERSION),
  form: z.enum(["copy", "permute"]),
  blockSizeRatio: positive,
  groups: z.array(z.enum(KV_CACHE_KINDS)).max(65_536),
  mapping: z.strictObject({
    sourceRanksPerGroup: z.array(ranks).max(65_536),
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
        groups: z.array(whole).max(65_536),
        localListKey: z.string().max(1000),
        localTable: table,
        remoteTable: table,
      }),
    )
    .max(65_536),
  localConsumers: positive,
  notifyOnlyRanks: ranks,
  conversions: z.array(z.enum(["attention-order", "hnd-to-nhd"])),
  localHeads: positive,
  blockOrder: z.enum(["head-major", "token-major", "opaque"]),
  uncovered: z.enum(["zeroed", "masked"]),
  localIndexing: z.array(indexing).max(65_536),
  remoteIndexing: z.array(indexing).max(65_536),
  regionsOfGroup: z.array(z.array(whole).max(65_536)).max(65_536),
});

/** A plan as plain JSON: everything that it decides, its tables written out. */
export type PlanDocument = z.infer<typeof planDocumentSchema>;
