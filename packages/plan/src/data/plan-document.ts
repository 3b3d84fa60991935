import { DESCRIPTOR_ROW, type DescriptorTable, KvError } from "@kv/interface";
import type { EngineTransferPlan } from "../engine-plan-types.js";
import { canonicalJson } from "./canonical-json.js";
import { describeIssues } from "./issues.js";
import { PLAN_DOCUMENT_VERSION, type PlanDocument, planDocumentSchema } from "./plan-schema.js";
import { sha256Hex } from "./sha256.js";

/** The plan as plain data, ready for `JSON.stringify`. Its size grows with regions and sources, not with blocks. */
export function planToDocument(plan: EngineTransferPlan): PlanDocument {
  const { mapping } = plan;
  return {
    version: PLAN_DOCUMENT_VERSION,
    form: plan.form,
    blockSizeRatio: plan.blockSizeRatio,
    groups: [...plan.groups],
    mapping: {
      sourceRanksPerGroup: mapping.sourceRanksPerGroup.map((ranks) => [...ranks]),
      allSourceRanks: [...mapping.allSourceRanks],
      rankToAttentionSlot: { ...mapping.rankToAttentionSlot },
      rankOffsetFactor: mapping.rankOffsetFactor,
      localConsumers: mapping.localConsumers,
      handshakeRanks: [...mapping.handshakeRanks],
      notifyOnlyRanks: [...mapping.notifyOnlyRanks],
    },
    local: rankDocument(plan.local),
    remote: rankDocument(plan.remote),
    sources: plan.sources.map((source) => ({
      remoteRank: source.remoteRank,
      groups: [...source.groups],
      localListKey: source.localListKey,
      localTable: tableDocument(source.localTable),
      remoteTable: tableDocument(source.remoteTable),
    })),
    localConsumers: plan.localConsumers,
    notifyOnlyRanks: [...plan.notifyOnlyRanks],
    conversions: [...plan.conversions],
    localHeads: plan.localHeads,
    blockOrder: plan.blockOrder,
    uncovered: plan.uncovered,
    localIndexing: plan.localIndexing.map((steps) => ({ ...steps })),
    remoteIndexing: plan.remoteIndexing.map((steps) => ({ ...steps })),
    regionsOfGroup: plan.regionsOfGroup.map((regions) => [...regions]),
  };
}

/**
 * A plan from JSON: checked for its form, not for being right; `provePlan` does that. Errors: `KV_PLAN_INVALID` naming the member, or the
 * version that is not known.
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
  const { version: _version, sources, ...rest } = parsed.data;
  return Object.freeze({
    ...rest,
    sources: Object.freeze(
      sources.map((source) =>
        Object.freeze({
          ...source,
          localTable: tableOf(source.localTable),
          remoteTable: tableOf(source.remoteTable),
        }),
      ),
    ),
  });
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
    regions: one.regions.map((region) => ({ ...region, baseAddress: 0 })),
  });
  return {
    ...document,
    local: rank(document.local),
    remote: rank(document.remote),
    sources: document.sources.map(({ localTable: _local, remoteTable: _remote, ...source }) => source),
  };
}

function rankDocument(rank: EngineTransferPlan["local"]): PlanDocument["local"] {
  return { ...rank, dcpSize: rank.dcpSize ?? 1, regions: rank.regions.map((region) => ({ ...region })) };
}

function tableDocument({ memoryType, rows }: DescriptorTable): PlanDocument["sources"][number]["localTable"] {
  const written: number[][] = [];
  for (let at = 0; at < rows.length; at += DESCRIPTOR_ROW)
    written.push([...rows.subarray(at, at + DESCRIPTOR_ROW)]);
  return { memoryType, rows: written };
}

function tableOf(table: PlanDocument["sources"][number]["localTable"]): DescriptorTable {
  return Object.freeze({ memoryType: table.memoryType, rows: Float64Array.from(table.rows.flat()) });
}
