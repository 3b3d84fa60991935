import { KvError } from "@kv/interface";
import type { EngineTransferPlan } from "../engine/engine-plan.js";
import type { RankGeometry } from "../geometry/rank-geometry.js";
import type { RequestBlocks } from "../request/request-blocks.js";
import { cacheSemantics, tokensInBlock } from "./cache-semantics.js";

/**
 * Enough for every pattern, few enough to be quick; in logical blocks of the side with the larger
 * ones.
 */
const BLOCKS = 24;
const FEWEST_BLOCKS = 3;
/** Approximate, per sample: a block may be cut into many pieces. */
const DESCRIPTORS = 20_000;

/**
 * Returns requests that cover what a plan does: consecutive and scattered blocks up to both ends of
 * the pools, a partial last block, a prefix hit, and a window whose first blocks are freed.
 *
 * @throws `KV_PLAN_INVALID` for caches that are too small for a request.
 */
export function sampleRequests(
  plan: EngineTransferPlan,
): readonly { readonly blocks: RequestBlocks }[] {
  const { local, remote, segments, sources } = plan;
  const lists = plan.groups.map((kind) => cacheSemantics(kind)?.lists);
  const groups = lists.length;
  const sides = [sideOf(local, remote, lists), sideOf(remote, local, lists)] as const;
  const [mine, theirs] = sides;
  const pieces = segments.reduce((sum, { localParts }) => sum + localParts, 0) * sources.length;
  const perBlock =
    pieces * Math.max(local.physicalBlocksPerLogical, remote.physicalBlocksPerLogical);
  const sampled = Math.max(FEWEST_BLOCKS, Math.min(BLOCKS, Math.floor(DESCRIPTORS / perBlock)));
  const room = Math.min(
    sampled * Math.max(mine.tokens, theirs.tokens),
    ...sides.map(({ pool, tokens }) => Math.floor(pool / groups) * tokens),
  );
  if (room === 0) {
    const [localPool, remotePool] = [mine.pool, theirs.pool];
    throw new KvError(
      "KV_PLAN_INVALID",
      `no request fits into caches of ${localPool} and ${remotePool} logical blocks: each of ${groups} groups needs one`,
      { hint: "give both engines more blocks", details: { localPool, remotePool, groups } },
    );
  }

  const counts = [room, Math.max(1, room - 1), Math.max(1, room - Math.ceil(mine.tokens / 2))];
  return counts.flatMap((numTokens) =>
    [false, true].map((isScattered) => {
      const third = (ids: readonly number[], group: number, kind: string) =>
        isScattered && lists[group] === kind ? Math.floor(ids.length / 3) : 0;
      const [locals, remotes] = sides.map(({ blockTokens, pool }) =>
        lists.map((kind, group) => {
          // Where the pool cannot hold a whole sequence of small window blocks: as many as fit,
          // from its end.
          const all = Math.ceil(numTokens / (blockTokens[group] as number));
          const count = kind === "last" ? 1 : Math.min(all, Math.floor(pool / groups));
          return blocksOfPool(pool, groups, group, count, isScattered);
        }),
      ) as [number[][], number[][]];
      const computed = locals.map((ids, group) => third(ids, group, "sequence"));
      return {
        blocks: {
          localBlockIds: locals.map((ids, group) => ids.slice(computed[group])),
          remoteBlockIds: remotes.map((ids, group) => ids.slice(third(ids, group, "window"))),
          numTokens,
          localComputedBlocks: computed,
        },
      };
    }),
  );
}

function sideOf(rank: RankGeometry, other: RankGeometry, lists: readonly unknown[]) {
  const { physicalBlocksPerLogical: per, kernelBlockSize, regions } = rank;
  const blockTokens = lists.map((_, group) => tokensInBlock(rank, group, other) * per);
  const whole = blockTokens.filter((_, group) => lists[group] === "sequence");
  return {
    pool: Math.floor(Math.min(...regions.map(({ numBlocks }) => numBlocks)) / per),
    blockTokens,
    /** The fewest in a logical block, among groups of the whole sequence. */
    tokens: whole.length === 0 ? kernelBlockSize * per : Math.min(...whole),
  };
}

/** Groups may share regions, so they take disjoint parts of the pool. */
function blocksOfPool(
  pool: number,
  groups: number,
  group: number,
  count: number,
  isScattered: boolean,
): number[] {
  const first = Math.floor((group * pool) / groups);
  const last = Math.floor(((group + 1) * pool) / groups) - 1;
  const step = Math.max(1, Math.floor(Math.floor(pool / groups) / count));
  return Array.from({ length: count }, (_, index) =>
    isScattered ? last - index * step : first + index,
  );
}
