import { DESCRIPTOR_ROW, type DescriptorTable, KvError } from "@kv/interface";
import type { EngineTransferPlan, RankGeometry, SourcePlan } from "@kv/plan";
import {
  describeIssues,
  PLAN_DOCUMENT_VERSION,
  type PlanDocument,
  planDocumentSchema,
} from "./plan-schema.js";

/**
 * The plan as plain data for `JSON.stringify`. Its size grows with regions and sources, not with blocks. Errors: `KV_PLAN_INVALID` for a table in memory
 * other than DRAM and VRAM.
 */
export function planToDocument(plan: EngineTransferPlan): PlanDocument {
  const { sources, local, remote, ...rest } = plan;
  return {
    version: PLAN_DOCUMENT_VERSION,
    ...(plain(rest) as Omit<PlanDocument, "version" | "sources" | "local" | "remote">),
    local: rankDocument(local),
    remote: rankDocument(remote),
    sources: sources.map(({ remoteRank, remotePpRank, groups, segments, remoteIndexing, lists }) => ({
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
    })),
  };
}

/** A copy without frozen objects and getters. */
function plain(value: unknown): unknown {
  if (Array.isArray(value)) return value.map(plain);
  if (typeof value !== "object" || value === null) return value;
  return Object.fromEntries(Object.entries(value).map(([key, member]) => [key, plain(member)]));
}

/**
 * A plan from JSON. Checks the form of the document and the lengths of its lists. It does not check that the plan is right: `provePlan` does. Errors:
 * `KV_PLAN_INVALID` with the member, or with an unknown version.
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
  const parsed = planDocumentSchema.safeParse(document);
  if (!parsed.success) throw new KvError("KV_PLAN_INVALID", `not a plan: ${describeIssues(parsed.error)}`);
  requireLengths(parsed.data);
  const { version: _version, sources, local, remote, groupPlans, ...rest } = parsed.data;
  return Object.freeze({ ...rest, groupPlans, local, remote, sources: Object.freeze(sources.map(sourceOf)) });
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
  return Object.freeze({ ...source, lists: Object.freeze(lists), localListKey, localTable, remoteTable });
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
  return Object.freeze({ memoryType: table.memoryType, rows: Float64Array.from(table.rows.flat()) });
}

/** Refuses a document whose lists do not fit together: indices of one list lead into others. Errors: `KV_PLAN_INVALID`. */
function requireLengths(plan: PlanDocument): void {
  const { groups, segments, sources, local } = plan;
  if (groups.length === 0) throw invalid("groups is empty: a plan has at least one KV cache group");
  requireLength("groupPlans", plan.groupPlans, groups.length, "groups");
  requireLength("regionsOfGroup", plan.regionsOfGroup, groups.length, "groups");
  requireLength("headsOfRegion", plan.headsOfRegion, local.regions.length, "local regions");
  requireLength("localIndexing", plan.localIndexing, segments.length, "segments");
  requireLength("remoteIndexing", plan.remoteIndexing, sources.length && segments.length, "segments");
  for (const [group, regions] of plan.regionsOfGroup.entries())
    requireBelow(`regionsOfGroup.${group}`, regions, local.regions.length, "local regions");
  for (const [group, own] of plan.groupPlans.entries()) {
    requireBelow(`groupPlans.${group}.segments`, own.segments, segments.length, "segments");
    if (own.kind !== groups[group])
      throw invalid(`groupPlans.${group}.kind is "${own.kind}", groups.${group} is "${groups[group]}"`);
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

function requireLength(member: string, list: readonly unknown[], expected: number, what: string): void {
  if (list.length === expected) return;
  throw invalid(`${member} has ${list.length} entries for ${expected} ${what}`);
}

function requireBelow(member: string, indices: readonly number[], limit: number, what: string): void {
  const beyond = indices.find((index) => index >= limit);
  if (beyond === undefined) return;
  throw invalid(`${member} names ${beyond}, of ${limit} ${what}`);
}

function invalid(what: string): KvError {
  return new KvError("KV_PLAN_INVALID", `not a plan: ${what}`);
}
