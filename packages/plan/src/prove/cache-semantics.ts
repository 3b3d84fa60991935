import type { KvCacheKind } from "@kv/interface";
import type { ModelGeometry, RankGeometry, RegionGeometry } from "../geometry/rank-geometry.js";

/**
 * What a kind of cache is, as far as a proof needs it: how ranks share it, and what a list of its blocks stands for. Said here anew, and
 * not taken from the planner's own files of kinds.
 */
export interface CacheSemantics {
  /** `heads`: by KV head. `replicated`: the same on every rank. `state`: cut evenly. */
  readonly sharing: "heads" | "replicated" | "state";
  /** `sequence`: from the first token on. `window`: up to the last one. `last`: blocks without tokens, which end together. */
  readonly lists: "sequence" | "window" | "last";
}

const KINDS: Readonly<Record<string, CacheSemantics | undefined>> = {
  full: { sharing: "heads", lists: "sequence" },
  mla: { sharing: "replicated", lists: "sequence" },
  swa: { sharing: "heads", lists: "window" },
  "swa-mla": { sharing: "replicated", lists: "window" },
  mamba: { sharing: "state", lists: "last" },
  circular: { sharing: "replicated", lists: "last" },
};

/** Undefined for a kind whose meaning is not known here: such a plan cannot be proven. */
export function cacheSemantics(kind: KvCacheKind): CacheSemantics | undefined {
  return KINDS[kind];
}

export interface HeadRange {
  readonly begin: number;
  readonly size: number;
}

/** KV heads of a rank, of so many: equal shares, or one head for several neighbours where there are more ranks than heads. */
function headsOfRank(rank: RankGeometry, numKvHeads: number): HeadRange {
  const share = numKvHeads / rank.tpSize;
  return share >= 1
    ? { begin: rank.tpRank * share, size: share }
    : { begin: Math.floor(rank.tpRank * share), size: 1 };
}

/** Heads of a group's blocks in one region of a rank; head 0 alone for what is the same on every rank. */
export function headsInRegion(
  rank: RankGeometry,
  region: RegionGeometry,
  group: number,
  model: ModelGeometry,
): HeadRange {
  const sharing = cacheSemantics(model.groups[group] ?? "")?.sharing;
  const replicated = region.replicated ?? (region.numKvHeads === undefined && sharing === "replicated");
  if (replicated) return { begin: 0, size: 1 };
  return headsOfRank(rank, region.numKvHeads ?? model.groupKvHeads?.[group] ?? model.numKvHeads);
}

/** Tokens in a kernel block of a group; the remote may leave to be inferred what the local side says. */
export function tokensInBlock(rank: RankGeometry, group: number, other: RankGeometry): number {
  const own = rank.groupBlockTokens?.[group];
  if (own !== undefined) return own / rank.physicalBlocksPerLogical;
  const told = other.groupBlockTokens?.[group];
  if (told === undefined) return rank.kernelBlockSize;
  return (told / other.physicalBlocksPerLogical) * (rank.kernelBlockSize / other.kernelBlockSize);
}

/** Regions that hold a group's blocks, by what the regions say of themselves. */
export function regionsHolding(rank: RankGeometry, group: number): readonly number[] {
  const named = rank.regions.map((region) => region.groupId);
  const one = named.every((id) => id === named[0]);
  return [...rank.regions.entries()].flatMap(([index, region]) => {
    if (region.groupIds !== undefined) return region.groupIds.includes(group) ? [index] : [];
    return one || region.groupId === group || region.groupId === -1 ? [index] : [];
  });
}
