import type { KvCacheKind } from "@kv/interface";
import { invalidPlan } from "../errors.js";
import type { ModelGeometry, RankGeometry, RegionGeometry } from "../geometry/rank-geometry.js";

/**
 * What a proof knows of a kind of cache: how ranks share it, and what its lists of blocks hold. A
 * proof that asked the planner would prove nothing.
 */
export interface CacheSemantics {
  /** `heads`: by KV head. `replicated`: the same on every rank. `state`: cut evenly. */
  readonly sharing: "heads" | "replicated" | "state";
  /**
   * `sequence`: from the first token. `window`: up to the last token. `last`: no tokens; both lists
   * end together.
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
 * Tells proofs in this process what a kind of another package holds, so that its plans can be
 * proven. Write it from the kind itself, not from the planner's definition.
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

/** Undefined for an unknown kind, whose plans cannot be proven. */
export function cacheSemantics(kind: KvCacheKind): CacheSemantics | undefined {
  return KINDS.get(kind);
}

/** Consecutive KV heads of the model. */
export interface HeadRange {
  readonly begin: number;
  readonly size: number;
}

/** Neighbouring ranks share a head where ranks outnumber heads. */
function headsOfRank(rank: RankGeometry, numKvHeads: number): HeadRange {
  const share = numKvHeads / rank.tpSize;
  return share >= 1
    ? { begin: rank.tpRank * share, size: share }
    : { begin: Math.floor(rank.tpRank * share), size: 1 };
}

/**
 * Returns the KV heads of a group's blocks in a region; head 0 where every rank holds the same
 * bytes.
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

/** Without `groupBlockTokens` of its own, a rank has the other side's ratio. */
export function tokensInBlock(rank: RankGeometry, group: number, other: RankGeometry): number {
  const own = rank.groupBlockTokens?.[group];
  if (own !== undefined) return own / rank.physicalBlocksPerLogical;
  const given = other.groupBlockTokens?.[group];
  if (given === undefined) return rank.kernelBlockSize;
  return (given / other.physicalBlocksPerLogical) * (rank.kernelBlockSize / other.kernelBlockSize);
}

export function regionsHolding(rank: RankGeometry, group: number): readonly number[] {
  const named = rank.regions.map((region) => region.groupId);
  const one = named.every((id) => id === named[0]);
  return [...rank.regions.entries()].flatMap(([index, region]) => {
    if (region.groupIds !== undefined) return region.groupIds.includes(group) ? [index] : [];
    return one || region.groupId === group || region.groupId === -1 ? [index] : [];
  });
}
