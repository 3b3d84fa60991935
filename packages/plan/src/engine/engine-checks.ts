import { type KvCacheKind, KvError } from "@kv/interface";
import type { TpMapping } from "@kv/topology";
import { incompatible, unsupported } from "../errors.js";
import type { RankGeometry } from "../geometry/rank-geometry.js";
import { cacheKind } from "../kinds/registry.js";
import type { AlignedRank } from "./align-regions.js";
import type { AttentionShape, BlockParts } from "./attention-pieces.js";
import type { RegionPair } from "./segments.js";

/** What cannot be dealt out to the ranks of a DCP group, or not to groups of such sizes. Errors: `KV_PLAN_UNSUPPORTED`. */
export function refuseDcp(
  local: RankGeometry,
  remote: RankGeometry,
  { groups, isMla }: { readonly groups: readonly KvCacheKind[]; readonly isMla: boolean },
): void {
  const [mine, theirs] = [local.dcpSize ?? 1, remote.dcpSize ?? 1];
  if (mine === 1 && theirs === 1) return;
  // A DCP group shares the blocks of one KV head: with several heads to a rank there are other ranks to read.
  if (!isMla) throw unsupported("only MLA caches can be sharded by DCP", mine, theirs);
  for (const [index, kind] of groups.entries()) {
    const { sharding, extent } = cacheKind(kind);
    if (sharding === "replicated" && extent === "sequence") continue;
    throw unsupported(
      `group ${index} (${kind}) cannot be dealt out to the ranks of a DCP group`,
      mine,
      theirs,
    );
  }
  for (const { tpSize, dcpSize = 1 } of [local, remote]) {
    if (tpSize % dcpSize === 0) continue;
    throw new KvError("KV_PLAN_INVALID", `DCP groups of ${dcpSize} ranks do not divide TP size ${tpSize}`, {
      details: { tpSize, dcpSize },
    });
  }
}

/** Block ids are by group: a region must belong to the same one on both sides. */
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

/** Blocks must divide into what is moved of them, alike on both sides. */
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
      const cells = side.heads * (opaque || !plainTokens ? 1 : side.tokens);
      if (side.blockBytes % cells === 0 && side.blockBytes % (side.heads * parts) === 0) continue;
      // A state of compressed latents stands for several tokens; its blocks are moved whole, and only whole.
      if (pairs[index]?.heads === undefined && localParts === 1 && remoteParts === 1) continue;
      // Pages of hybrids are padded to the size of a state: their heads and tokens need not divide them, only what is moved must.
      if ((pairs[index]?.stateGroups.length ?? 0) > 0 && side.blockBytes % (side.heads * parts) === 0)
        continue;
      throw new KvError(
        "KV_PLAN_INVALID",
        `region "${region}": a block of ${side.blockBytes} bytes does not divide into ${side.heads} heads of ${side.tokens} tokens`,
        { details: { region, blockBytes: side.blockBytes, heads: side.heads, tokens: side.tokens, parts } },
      );
    }
    const [mine, theirs] = [
      local.blockBytes / (local.heads * localParts),
      remote.blockBytes / (remote.heads * remoteParts),
    ];
    // vLLM does not compare the pages of hybrids, and NIXL refuses its descriptors then.
    if (mine !== theirs) {
      throw incompatible(
        `region "${region}": blocks do not have as many bytes for each head and part`,
        `${mine} of ${local.blockBytes}`,
        `${theirs} of ${remote.blockBytes}`,
      );
    }
  }
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

/** A cache that two stages hold would be moved twice. */
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
      throw new KvError(
        "KV_PLAN_INVALID",
        `cache "${local.regions[region]?.name}" is on the remote pipeline stages ${holder} and ${ppRank}`,
        { details: { region, stages: [holder, ppRank] } },
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
