import { KvError } from "@kv/interface";
import type { PlanDocument } from "./plan-schema.js";

/** Refuses a document whose lists do not go together: whoever steps through one of them looks into the others. Errors: `KV_PLAN_INVALID`. */
export function requireLengths(plan: PlanDocument): void {
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
