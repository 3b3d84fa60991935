import { DESCRIPTOR_ROW, type DescriptorTable, KV_CACHE_LAYOUTS, KvError } from "@kv/interface";
import type { EngineTransferPlan, RankGeometry, SourcePlan } from "@kv/plan";
import { unknownKeys } from "@kv/program/unknown-keys";
import { z } from "zod";

/** Version of `PlanDocument`. It grows when older readers would misread a document. */
export const PLAN_DOCUMENT_VERSION = 1;

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
  groupIds: z.array(whole).max(65_536).optional(),
  numKvHeads: positive.optional(),
  cellBytes: positive.optional(),
  replicated: z.boolean().optional(),
  members: z.array(z.string().max(1000)).max(65_536).optional(),
  deviceId: whole.optional(),
});

export const stateSpaceSchema = z.strictObject({
  convProjectionBytes: z.array(whole).max(1024).optional(),
  convBytes: whole,
  recurrentBytes: whole,
});

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
/** Any kind: a plan with an unknown one can be read, and `planRequest` works on its extent. */
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
            z.strictObject({
              localListKey: z.string().max(10_000),
              localTable: table,
              remoteTable: table,
            }),
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

export function describeIssues(error: z.ZodError): string {
  const shown = error.issues.slice(0, 3).map((issue) => {
    const place = issue.path.length === 0 ? "the document" : issue.path.join(".");
    const text = `${place}: ${issue.message}`;
    // The document may choose long names.
    return text.length <= MOST_ISSUE_CHARACTERS ? text : `${text.slice(0, MOST_ISSUE_CHARACTERS)}…`;
  });
  const more = error.issues.length - shown.length;
  return shown.join("; ") + (more > 0 ? `; and ${more} more` : "");
}

/**
 * A plan for `JSON.stringify`. Its size grows with regions and sources, not with blocks.
 * @throws `KV_PLAN_INVALID` for a table in memory other than DRAM and VRAM.
 */
export function planToDocument(plan: EngineTransferPlan): PlanDocument {
  const { sources, local, remote, ...rest } = plan;
  return {
    version: PLAN_DOCUMENT_VERSION,
    ...(plain(rest) as Omit<PlanDocument, "version" | "sources" | "local" | "remote">),
    local: rankDocument(local),
    remote: rankDocument(remote),
    sources: sources.map(
      ({ remoteRank, remotePpRank, groups, segments, remoteIndexing, lists }) => ({
        remoteRank,
        remotePpRank,
        groups: [...groups],
        segments: [...segments],
        remoteIndexing: remoteIndexing.map((steps) => ({ ...steps })),
        lists: lists.map(({ localListKey, localTable, remoteTable }) => ({
          localListKey,
          localTable: tableDocument(localTable),
          remoteTable: tableDocument(remoteTable),
        })),
      }),
    ),
  };
}

function plain(value: unknown): unknown {
  if (Array.isArray(value)) return value.map(plain);
  if (typeof value !== "object" || value === null) return value;
  return Object.fromEntries(Object.entries(value).map(([key, member]) => [key, plain(member)]));
}

/**
 * A plan from JSON. Checks the document's form, not that the plan is right: `provePlan` does.
 * @throws `KV_PLAN_INVALID` with the member, or with an unknown version.
 */
export function planFromDocument(document: unknown): EngineTransferPlan {
  const version = (document as { version?: unknown } | null | undefined)?.version;
  if (typeof version === "number" && version !== PLAN_DOCUMENT_VERSION) {
    throw new KvError(
      "KV_PLAN_INVALID",
      `a plan of version ${version}: this release reads version ${PLAN_DOCUMENT_VERSION}`,
      {
        hint: "make the plan anew with this release, or read it with the one that wrote it",
        details: { version, known: PLAN_DOCUMENT_VERSION },
      },
    );
  }
  const parsed = planDocumentSchema.safeParse(document, { error: unknownKeys });
  if (!parsed.success)
    throw new KvError("KV_PLAN_INVALID", `not a plan: ${describeIssues(parsed.error)}`);
  requireLengths(parsed.data);
  const { version: _version, sources, local, remote, groupPlans, ...rest } = parsed.data;
  return Object.freeze({
    ...rest,
    groupPlans,
    local,
    remote,
    sources: Object.freeze(sources.map(sourceOf)),
  });
}

function sourceOf({ lists: written, ...source }: PlanDocument["sources"][number]): SourcePlan {
  const lists = written.map(({ localListKey, localTable, remoteTable }) =>
    Object.freeze({
      localListKey,
      localMemoryType: localTable.memoryType,
      remoteMemoryType: remoteTable.memoryType,
      localTable: tableOf(localTable),
      remoteTable: tableOf(remoteTable),
    }),
  );
  const [first] = lists;
  if (first === undefined)
    throw new KvError("KV_PLAN_INVALID", `not a plan: rank ${source.remoteRank} has no lists`);
  const { localListKey, localTable, remoteTable } = first;
  return Object.freeze({
    ...source,
    lists: Object.freeze(lists),
    localListKey,
    localTable,
    remoteTable,
  });
}

function rankDocument(rank: RankGeometry): PlanDocument["local"] {
  return { ...(plain(rank) as PlanDocument["local"]), dcpSize: rank.dcpSize ?? 1 };
}

type TableDocument = PlanDocument["sources"][number]["lists"][number]["localTable"];

function tableDocument({ memoryType, rows }: DescriptorTable): TableDocument {
  if (memoryType !== "DRAM" && memoryType !== "VRAM") {
    throw new KvError(
      "KV_PLAN_INVALID",
      `a table of a plan describes ${memoryType}, and a KV cache is in DRAM or VRAM`,
    );
  }
  const written: number[][] = [];
  for (let at = 0; at < rows.length; at += DESCRIPTOR_ROW)
    written.push([...rows.subarray(at, at + DESCRIPTOR_ROW)]);
  return { memoryType, rows: written };
}

function tableOf(table: TableDocument): DescriptorTable {
  return Object.freeze({
    memoryType: table.memoryType,
    rows: Float64Array.from(table.rows.flat()),
  });
}

/**
 * Checks list lengths, because indices of one list lead into others.
 * @throws `KV_PLAN_INVALID`.
 */
function requireLengths(plan: PlanDocument): void {
  const { groups, segments, sources, local } = plan;
  if (groups.length === 0) throw invalid("groups is empty: a plan has at least one KV cache group");
  requireLength("groupPlans", plan.groupPlans, groups.length, "groups");
  requireLength("regionsOfGroup", plan.regionsOfGroup, groups.length, "groups");
  requireLength("headsOfRegion", plan.headsOfRegion, local.regions.length, "local regions");
  requireLength("localIndexing", plan.localIndexing, segments.length, "segments");
  requireLength(
    "remoteIndexing",
    plan.remoteIndexing,
    sources.length && segments.length,
    "segments",
  );
  for (const [group, regions] of plan.regionsOfGroup.entries())
    requireBelow(`regionsOfGroup.${group}`, regions, local.regions.length, "local regions");
  for (const [group, own] of plan.groupPlans.entries()) {
    requireBelow(`groupPlans.${group}.segments`, own.segments, segments.length, "segments");
    if (own.kind !== groups[group])
      throw invalid(
        `groupPlans.${group}.kind is "${own.kind}", groups.${group} is "${groups[group]}"`,
      );
  }
  for (const [index, { region }] of segments.entries())
    requireBelow(`segments.${index}.region`, [region], local.regions.length, "local regions");
  const lists = segments.map(({ list }) => list);
  for (const [index, source] of sources.entries()) {
    const at = `sources.${index}`;
    requireLength(`${at}.remoteIndexing`, source.remoteIndexing, segments.length, "segments");
    requireBelow(`${at}.segments`, source.segments, segments.length, "segments");
    requireBelow(`${at}.groups`, source.groups, groups.length, "groups");
    requireBelow("segments.*.list", lists, source.lists.length, `lists of ${at}`);
  }
}

function requireLength(
  member: string,
  list: readonly unknown[],
  expected: number,
  what: string,
): void {
  if (list.length === expected) return;
  throw invalid(`${member} has ${list.length} entries for ${expected} ${what}`);
}

function requireBelow(
  member: string,
  indices: readonly number[],
  limit: number,
  what: string,
): void {
  const beyond = indices.find((index) => index >= limit);
  if (beyond === undefined) return;
  throw invalid(`${member} names ${beyond}, of ${limit} ${what}`);
}

function invalid(what: string): KvError {
  return new KvError("KV_PLAN_INVALID", `not a plan: ${what}`);
}
