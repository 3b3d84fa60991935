import type { KvCacheKind } from "@kv/interface";
import { invalidPlan } from "../errors.js";
import type { ModelGeometry, RankGeometry, RegionGeometry } from "../geometry/rank-geometry.js";

/**
 * The semantics of a kind of cache that a proof needs: how ranks share it, and the part of a
 * sequence that its lists of blocks hold. Defined here a second time, independent of the planner's
 * kinds: a proof that asks the planner proves nothing.
 */
export interface CacheSemantics {
  /** `heads`: by KV head. `replicated`: the same on every rank. `state`: cut evenly. */
  readonly sharing: "heads" | "replicated" | "state";
  /**
   * `sequence`: from the first token on. `window`: up to the last token. `last`: blocks without
   * tokens; both lists end together.
   */
  readonly lists: "sequence" | "window" | "last";
}

const KINDS = new Map<string, CacheSemantics>([
  ["full", { sharing: "heads", lists: "sequence" }],
  ["mla", { sharing: "replicated", lists: "sequence" }],
  ["swa", { sharing: "heads", lists: "window" }],
  ["swa-mla", { sharing: "replicated", lists: "window" }],
  ["mamba", { sharing: "state", lists: "last" }],
  ["circular", { sharing: "replicated", lists: "last" }],
]);

/**
 * Tells proofs in this process what a kind of another package holds. Its plans cannot be proven
 * before. Write it from what the kind is, not from the planner's definition.
 * @throws `KV_PLAN_INVALID` for a name with other semantics.
 */
export function registerCacheSemantics(kind: string, semantics: CacheSemantics): void {
  const known = KINDS.get(kind);
  if (
    known !== undefined &&
    (known.sharing !== semantics.sharing || known.lists !== semantics.lists)
  ) {
    throw invalidPlan(
      `cache kind ${JSON.stringify(kind)} has other semantics already: ${JSON.stringify(known)}, not ${JSON.stringify(semantics)}`,
    );
  }
  KINDS.set(kind, semantics);
}

/** The semantics of a kind; undefined for an unknown kind, whose plans cannot be proven. */
export function cacheSemantics(kind: KvCacheKind): CacheSemantics | undefined {
  return KINDS.get(kind);
}

/** Consecutive KV heads of the model. */
export interface HeadRange {
  /** The first head. */
  readonly begin: number;
  /** The number of heads. */
  readonly size: number;
}

/**
 * KV heads of a rank: equal shares, or one head for several neighbouring ranks where there are more
 * ranks than heads.
 */
function headsOfRank(rank: RankGeometry, numKvHeads: number): HeadRange {
  const share = numKvHeads / rank.tpSize;
  return share >= 1
    ? { begin: rank.tpRank * share, size: share }
    : { begin: Math.floor(rank.tpRank * share), size: 1 };
}

/**
 * KV heads of a group's blocks in one region of a rank; head 0 alone where every rank holds the
 * same bytes.
 */
export function headsInRegion(
  rank: RankGeometry,
  region: RegionGeometry,
  group: number,
  model: ModelGeometry,
): HeadRange {
  const sharing = cacheSemantics(model.groups[group] ?? "")?.sharing;
  const replicated =
    region.replicated ?? (region.numKvHeads === undefined && sharing === "replicated");
  if (replicated) return { begin: 0, size: 1 };
  return headsOfRank(rank, region.numKvHeads ?? model.groupKvHeads?.[group] ?? model.numKvHeads);
}

/**
 * Tokens in a kernel block of a group. Where a rank has no `groupBlockTokens`, the other side's
 * give the ratio.
 */
export function tokensInBlock(rank: RankGeometry, group: number, other: RankGeometry): number {
  const own = rank.groupBlockTokens?.[group];
  if (own !== undefined) return own / rank.physicalBlocksPerLogical;
  const given = other.groupBlockTokens?.[group];
  if (given === undefined) return rank.kernelBlockSize;
  return (given / other.physicalBlocksPerLogical) * (rank.kernelBlockSize / other.kernelBlockSize);
}

/** Regions that hold a group's blocks, by their own `groupId` and `groupIds`. */
export function regionsHolding(rank: RankGeometry, group: number): readonly number[] {
  const named = rank.regions.map((region) => region.groupId);
  const one = named.every((id) => id === named[0]);
  return [...rank.regions.entries()].flatMap(([index, region]) => {
    if (region.groupIds !== undefined) return region.groupIds.includes(group) ? [index] : [];
    return one || region.groupId === group || region.groupId === -1 ? [index] : [];
  });
}
