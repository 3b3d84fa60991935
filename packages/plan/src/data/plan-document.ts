import { DESCRIPTOR_ROW, type DescriptorTable, KvError } from "@kv/interface";
import type { EngineTransferPlan, GroupPlan, SourcePlan } from "../engine/engine-plan-types.js";
import type { RankGeometry } from "../geometry/rank-geometry.js";
import { canonicalJson } from "./canonical-json.js";
import { rankOf } from "./geometry-schema.js";
import { describeIssues } from "./issues.js";
import { requireLengths } from "./plan-lengths.js";
import { PLAN_DOCUMENT_VERSION, type PlanDocument, planDocumentSchema } from "./plan-schema.js";
import { sha256Hex } from "./sha256.js";

/** The plan as plain data, ready for `JSON.stringify`. Its size grows with regions and sources, not with blocks. */
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

/** A copy of plain data, with nothing frozen and no getter. */
function plain(value: unknown): unknown {
  if (Array.isArray(value)) return value.map(plain);
  if (typeof value !== "object" || value === null) return value;
  return Object.fromEntries(Object.entries(value).map(([key, member]) => [key, plain(member)]));
}

/**
 * A plan from JSON: checked for its form, and that its lists go together, not for being right; `provePlan` does that. Errors:
 * `KV_PLAN_INVALID` naming the member, or the version that is not known.
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
  return Object.freeze({
    ...rest,
    // Members that are left out are not `undefined` in what was parsed.
    groupPlans: groupPlans as readonly GroupPlan[],
    local: rankOf(local),
    remote: rankOf(remote),
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
  return Object.freeze({ ...source, lists: Object.freeze(lists), localListKey, localTable, remoteTable });
}

/**
 * SHA-256 in hex over the canonical JSON of a plan: equal for equal plans, on any machine. Without `addresses`, plans of two runs of one
 * deployment are equal as well: base addresses, devices and what follows from them are left out.
 */
export function hashPlan(plan: EngineTransferPlan, options: { readonly addresses?: boolean } = {}): string {
  const document = planToDocument(plan);
  return sha256Hex(canonicalJson(options.addresses === false ? withoutAddresses(document) : document));
}

function withoutAddresses(document: PlanDocument): unknown {
  const rank = (one: PlanDocument["local"]) => ({
    ...one,
    deviceId: 0,
    regions: one.regions.map(({ deviceId: _device, ...region }) => ({ ...region, baseAddress: 0 })),
  });
  return {
    ...document,
    local: rank(document.local),
    remote: rank(document.remote),
    sources: document.sources.map(({ lists, ...source }) => ({
      ...source,
      lists: lists.map(({ localListKey }) => localListKey),
    })),
  };
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
