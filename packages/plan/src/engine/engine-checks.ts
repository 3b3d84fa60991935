import type { KvCacheKind } from "@kv/interface";
import type { TpMapping } from "@kv/topology";
import { incompatible, invalidPlan, unsupported } from "../errors.js";
import type { RankGeometry } from "../geometry/rank-geometry.js";
import { cacheKind } from "../kinds/registry.js";
import type { AlignedRank } from "./align-regions.js";
import type { AttentionShape, BlockParts, RegionPair } from "./pieces.js";

/**
 * @throws `KV_PLAN_UNSUPPORTED` for what decode context parallelism cannot serve, `KV_PLAN_INVALID`
 * where DCP groups do not divide an engine.
 */
export function assertContextParallelSupported(
  local: RankGeometry,
  remote: RankGeometry,
  { groups, isMla }: { readonly groups: readonly KvCacheKind[]; readonly isMla: boolean },
): void {
  const [mine, theirs] = [local.dcpSize ?? 1, remote.dcpSize ?? 1];
  if (mine === 1 && theirs === 1) return;
  // Its ranks share the blocks of one KV head. With several heads, other ranks would have to be
  // read too.
  if (!isMla) throw unsupported("only MLA caches can be sharded by DCP", mine, theirs);
  for (const [index, kind] of groups.entries()) {
    const { sharding, extent } = cacheKind(kind);
    if (sharding === "replicated" && extent === "sequence") continue;
    throw unsupported(
      `group ${index} (${kind}) cannot be sharded over the ranks of a DCP group`,
      mine,
      theirs,
    );
  }
  for (const { tpSize, dcpSize = 1 } of [local, remote]) {
    if (tpSize % dcpSize === 0) continue;
    throw invalidPlan(`DCP groups of ${dcpSize} ranks do not divide TP size ${tpSize}`, {
      tpSize,
      dcpSize,
    });
  }
}

/**
 * Block ids are given by group, so a region must have the same group on both sides.
 *
 * @throws `KV_PLAN_UNSUPPORTED`.
 */
export function requireSameGroups(pairs: readonly RegionPair[]): void {
  for (const { region, remoteRegion } of pairs) {
    if (region.groupId === remoteRegion.groupId) continue;
    throw unsupported(
      `region "${region.name}" is in different KV cache groups`,
      region.groupId,
      remoteRegion.groupId,
      "use the same cache layout and the same settings of the hybrid cache manager on both sides",
    );
  }
}

/**
 * @throws `KV_PLAN_INVALID` where a block does not divide into equal shares, `KV_PLAN_INCOMPATIBLE`
 * where the shares differ in bytes.
 */
export function requireWholeShares(
  pairs: readonly RegionPair[],
  shapes: readonly (AttentionShape | undefined)[],
  { localParts, remoteParts }: BlockParts,
  plainTokens: boolean,
): void {
  for (const [index, shape] of shapes.entries()) {
    if (shape === undefined) continue;
    const { region, heads: all, stateGroups } = pairs[index] as RegionPair;
    const { local, remote } = shape;
    const isKnown = local.order !== "opaque" && remote.order !== "opaque" && plainTokens;
    // Latents with several tokens and pages padded to the size of a state only move whole.
    const isPage =
      localParts === 1 && remoteParts === 1 && (all === undefined || stateGroups.length > 0);
    for (const [{ blockBytes, heads, tokens }, parts] of [
      [local, localParts],
      [remote, remoteParts],
    ] as const) {
      const cells = heads * (isKnown ? tokens : 1);
      const isWhole = blockBytes % cells === 0 && blockBytes % (heads * parts) === 0;
      if (isWhole || isPage || shape.isWhole === true) continue;
      throw invalidPlan(
        `region "${region.name}": a block of ${blockBytes} bytes does not divide into ${heads} heads of ${tokens} tokens`,
        { region: region.name, blockBytes, heads, tokens, parts },
      );
    }
    const mine = local.blockBytes / (local.heads * localParts);
    const theirs = remote.blockBytes / (remote.heads * remoteParts);
    // vLLM does not compare the pages of hybrids; NIXL then refuses the descriptors.
    if (mine !== theirs) {
      throw incompatible(
        `region "${region.name}": blocks do not have as many bytes for each head and part`,
        `${mine} of ${local.blockBytes}`,
        `${theirs} of ${remote.blockBytes}`,
      );
    }
  }
}

/**
 * Remote ranks of one engine may differ only in addresses, device and rank number.
 *
 * @throws `KV_PLAN_INVALID` with both values.
 */
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
    throw invalidPlan(
      `remote ranks ${first.tpRank} and ${other.tpRank} of one engine differ in ${key}: ${one[key]} and ${two[key]}`,
      { key, [first.tpRank]: one[key], [other.tpRank]: two[key] },
    );
  }
}

/**
 * A cache on two pipeline stages would be moved twice.
 * @throws `KV_PLAN_INVALID`.
 */
export function requireOneHolder(
  local: RankGeometry,
  stages: readonly { readonly ppRank: number; readonly aligned: AlignedRank }[],
): void {
  const holders = new Map<number, number>();
  for (const { ppRank, aligned } of stages) {
    for (const region of aligned.localRegions) {
      const holder = holders.get(region);
      holders.set(region, ppRank);
      if (holder === undefined) continue;
      throw invalidPlan(
        `cache "${local.regions[region]?.name}" is on the remote pipeline stages ${holder} and ${ppRank}`,
        { region, stages: [holder, ppRank] },
      );
    }
  }
}

/**
 * @throws `KV_PLAN_INCOMPATIBLE` for a rank that the mapping does not name, `KV_PLAN_INVALID` for
 * one that is given twice or is missing.
 */
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
    if (ranks.has(rank.tpRank)) throw invalidPlan(`remote rank ${rank.tpRank} is given twice`);
    ranks.set(rank.tpRank, rank);
  }
  const missing = mapping.allSourceRanks.filter((rank) => !ranks.has(rank));
  if (missing.length > 0) {
    throw invalidPlan(
      `the plan reads from remote ranks ${mapping.allSourceRanks.join(", ")}; the geometry of ${missing.join(", ")} is missing`,
      { sources: mapping.allSourceRanks, missing },
    );
  }
  return ranks;
}
