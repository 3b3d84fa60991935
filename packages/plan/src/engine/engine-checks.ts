import type { KvCacheKind } from "@kv/interface";
import type { TpMapping } from "@kv/topology";
import { incompatible, invalidPlan, unsupported } from "../errors.js";
import type { RankGeometry } from "../geometry/rank-geometry.js";
import { cacheKind } from "../kinds/registry.js";
import type { AlignedRank } from "./align-regions.js";
import type { AttentionShape, BlockParts } from "./attention-pieces.js";
import type { RegionPair } from "./segments.js";

/**
 * Refuses caches and sizes that decode context parallelism cannot serve.
 * @throws `KV_PLAN_UNSUPPORTED`, and `KV_PLAN_INVALID` where DCP groups do not divide an engine.
 */
export function assertContextParallelSupported(
  local: RankGeometry,
  remote: RankGeometry,
  { groups, isMla }: { readonly groups: readonly KvCacheKind[]; readonly isMla: boolean },
): void {
  const [mine, theirs] = [local.dcpSize ?? 1, remote.dcpSize ?? 1];
  if (mine === 1 && theirs === 1) return;
  // A DCP group shares the blocks of one KV head. With several heads per rank, other ranks would
  // have to be read too.
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
 * Refuses a region that belongs to different groups on the two sides: block ids are given by group.
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
 * Refuses blocks that do not divide into equal shares on both sides.
 *
 * @throws `KV_PLAN_INVALID` where a block does not divide, `KV_PLAN_INCOMPATIBLE` where the shares
 * differ in bytes.
 */
export function requireWholeShares(
  pairs: readonly RegionPair[],
  shapes: readonly (AttentionShape | undefined)[],
  { localParts, remoteParts }: BlockParts,
  plainTokens: boolean,
): void {
  for (const [index, shape] of shapes.entries()) {
    const region = pairs[index]?.region.name;
    if (shape === undefined || shape.sharedHeads === 0) continue;
    const { local, remote } = shape;
    const opaque = local.order === "opaque" || remote.order === "opaque";
    for (const [side, parts] of [
      [local, localParts],
      [remote, remoteParts],
    ] as const) {
      // A block that is only moved whole needs no cells, and its heads and tokens are as many on
      // both sides.
      if (shape.isWhole === true) continue;
      const cells = side.heads * (opaque || !plainTokens ? 1 : side.tokens);
      if (side.blockBytes % cells === 0 && side.blockBytes % (side.heads * parts) === 0) continue;
      // A compressed latent holds several tokens, and the pages of hybrids are padded to the size
      // of a state: such blocks are only moved whole.
      const isPage =
        pairs[index]?.heads === undefined || (pairs[index]?.stateGroups.length ?? 0) > 0;
      if (isPage && localParts === 1 && remoteParts === 1) continue;
      throw invalidPlan(
        `region "${region}": a block of ${side.blockBytes} bytes does not divide into ${side.heads} heads of ${side.tokens} tokens`,
        {
          region,
          blockBytes: side.blockBytes,
          heads: side.heads,
          tokens: side.tokens,
          parts,
        },
      );
    }
    const [mine, theirs] = [
      local.blockBytes / (local.heads * localParts),
      remote.blockBytes / (remote.heads * remoteParts),
    ];
    // vLLM does not compare the pages of hybrids; NIXL then refuses the descriptors.
    if (mine !== theirs) {
      throw incompatible(
        `region "${region}": blocks do not have as many bytes for each head and part`,
        `${mine} of ${local.blockBytes}`,
        `${theirs} of ${remote.blockBytes}`,
      );
    }
  }
}

/**
 * Refuses remote ranks of one engine that differ in more than addresses, device and rank number.
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
 * Refuses a cache that two pipeline stages hold: it would be moved twice.
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
 * The remote ranks by tensor-parallel rank.
 *
 * @throws `KV_PLAN_INCOMPATIBLE` for a rank that the mapping neither reads nor notifies,
 * `KV_PLAN_INVALID` for a rank that is given twice or is missing.
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
