import { type KvCacheKind, KvError } from "@kv/interface";
import type { TpMapping } from "@kv/topology";
import type { RankGeometry } from "./geometry.js";
import { incompatible, unsupported } from "./incompatible.js";

/** Kinds that this version maps but does not move yet. */
export function refuseKinds(groups: readonly KvCacheKind[]): void {
  if (groups.includes("mamba")) {
    throw new KvError(
      "KV_PLAN_UNSUPPORTED",
      `state-space caches cannot be transferred yet: groups are ${groups.join(", ")}`,
    );
  }
  if (!groups.includes("mla") || groups.every((kind) => kind === "mla")) return;
  throw new KvError(
    "KV_PLAN_UNSUPPORTED",
    `MLA together with other kinds cannot be transferred yet: groups are ${groups.join(", ")}`,
  );
}

export function refuseDcp(local: RankGeometry, remote: RankGeometry): void {
  const [mine, theirs] = [local.dcpSize ?? 1, remote.dcpSize ?? 1];
  if (mine > 1 || theirs > 1)
    throw unsupported("caches sharded by DCP cannot be transferred yet", mine, theirs);
}

/** Ranks of one engine differ in addresses, device and number; all else is the same. */
export function requireSameEngine(first: RankGeometry, other: RankGeometry): void {
  const facts = (rank: RankGeometry) => ({
    tpSize: rank.tpSize,
    dcpSize: rank.dcpSize ?? 1,
    kernelBlockSize: rank.kernelBlockSize,
    physicalBlocksPerLogical: rank.physicalBlocksPerLogical,
    layout: rank.layout,
    attentionBackend: rank.attentionBackend,
    regions: rank.regions.length,
    numBlocks: rank.regions.map((region) => region.numBlocks).join(),
  });
  const [one, two] = [facts(first), facts(other)];
  for (const key of Object.keys(one) as (keyof typeof one)[]) {
    if (one[key] === two[key]) continue;
    throw new KvError(
      "KV_PLAN_INVALID",
      `remote ranks ${first.tpRank} and ${other.tpRank} of one engine differ in ${key}: ${one[key]} and ${two[key]}`,
      { details: { key, [first.tpRank]: one[key], [other.tpRank]: two[key] } },
    );
  }
}

export function requireSameRegions(local: RankGeometry, remote: RankGeometry): void {
  for (const [index, region] of local.regions.entries()) {
    const other = remote.regions[index];
    if (other === undefined) continue;
    if (region.groupId !== other.groupId) {
      throw unsupported(
        `region "${region.name}" is in different KV cache groups`,
        region.groupId,
        other.groupId,
      );
    }
  }
  for (const rank of [local, remote]) {
    const types = new Set(rank.regions.map((region) => region.memoryType));
    if (types.size > 1) {
      throw unsupported(
        "regions in more than one type of memory cannot be transferred yet",
        local.regions.map((region) => region.memoryType),
        remote.regions.map((region) => region.memoryType),
      );
    }
  }
}

export function ranksByNumber(
  remotes: readonly RankGeometry[],
  mapping: TpMapping,
): ReadonlyMap<number, RankGeometry> {
  const ranks = new Map<number, RankGeometry>();
  for (const rank of remotes) {
    if (!mapping.handshakeRanks.includes(rank.tpRank)) {
      throw incompatible(
        `remote rank ${rank.tpRank} is not among those to read or notify`,
        mapping.handshakeRanks,
        rank.tpRank,
      );
    }
    if (ranks.has(rank.tpRank))
      throw new KvError("KV_PLAN_INVALID", `remote rank ${rank.tpRank} is given twice`);
    ranks.set(rank.tpRank, rank);
  }
  const missing = mapping.allSourceRanks.filter((rank) => !ranks.has(rank));
  if (missing.length > 0) {
    throw new KvError(
      "KV_PLAN_INVALID",
      `the plan reads from remote ranks ${mapping.allSourceRanks.join(", ")}; the geometry of ${missing.join(", ")} is missing`,
      { details: { sources: mapping.allSourceRanks, missing } },
    );
  }
  return ranks;
}
