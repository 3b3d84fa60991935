import { KvError } from "@kv/interface";
import type { EngineTransferPlan } from "../engine/engine-plan-types.js";
import type { RankGeometry } from "../geometry/rank-geometry.js";
import type { RequestBlocks } from "../request/request-plan-types.js";
import { cacheSemantics, tokensInBlock } from "./cache-semantics.js";

/**
 * The most logical blocks, of the side with the larger ones: enough for every pattern, and few
 * enough to be quick.
 */
const BLOCKS = 24;
const FEWEST_BLOCKS = 3;
/**
 * The approximate number of descriptors of one sample. A block that is cut into many pieces has
 * many.
 */
const DESCRIPTORS = 20_000;

/**
 * Requests that cover what a plan does: consecutive and scattered blocks up to both ends of the
 * pools, a partial last block, a prefix hit, and a window whose first blocks the remote has freed.
 * Errors: `KV_PLAN_INVALID` for caches that are too small for a request.
 */
export function sampleRequests(
  plan: EngineTransferPlan,
): readonly { readonly blocks: RequestBlocks }[] {
  const [localTokens, remoteTokens] = [
    logicalTokens(plan, plan.local, plan.remote),
    logicalTokens(plan, plan.remote, plan.local),
  ];
  const [localPool, remotePool] = [poolOf(plan.local), poolOf(plan.remote)];
  const groups = plan.groups.length;
  const pieces =
    plan.segments.reduce((sum, segment) => sum + segment.localParts, 0) * plan.sources.length;
  const perBlock =
    pieces * Math.max(plan.local.physicalBlocksPerLogical, plan.remote.physicalBlocksPerLogical);
  const sampled = Math.max(FEWEST_BLOCKS, Math.min(BLOCKS, Math.floor(DESCRIPTORS / perBlock)));
  const room = Math.min(
    sampled * Math.max(localTokens, remoteTokens),
    Math.floor(localPool / groups) * localTokens,
    Math.floor(remotePool / groups) * remoteTokens,
  );
  if (room === 0) {
    throw new KvError(
      "KV_PLAN_INVALID",
      `no request fits into caches of ${localPool} and ${remotePool} logical blocks: each of ${groups} groups needs one`,
      { hint: "give both engines more blocks", details: { localPool, remotePool, groups } },
    );
  }
  const tokens = [room, Math.max(1, room - 1), Math.max(1, room - Math.ceil(localTokens / 2))];
  return tokens.flatMap((numTokens) =>
    [false, true].map((scattered) => {
      const table =
        (rank: RankGeometry, other: RankGeometry, pool: number) =>
        (kind: string, group: number) => {
          const blockTokens = tokensInBlock(rank, group, other) * rank.physicalBlocksPerLogical;
          const isTokenless = cacheSemantics(kind)?.lists === "last";
          // The blocks of a window may be so small that the pool cannot hold the whole sequence:
          // then as many as fit, from its end.
          const count = isTokenless
            ? 1
            : Math.min(Math.ceil(numTokens / blockTokens), Math.floor(pool / groups));
          return scattered
            ? fromTheEnd(pool, groups, group, count)
            : consecutive(groups, group, count, pool);
        };
      const { local, remote } = plan;
      const locals = plan.groups.map(table(local, remote, localPool));
      const remotes = plan.groups.map(table(remote, local, remotePool));
      const computed = locals.map((ids, group) => {
        const sequence = cacheSemantics(plan.groups[group] ?? "")?.lists === "sequence";
        return scattered && sequence ? Math.floor(ids.length / 3) : 0;
      });
      return {
        blocks: {
          localBlockIds: locals.map((ids, group) => ids.slice(computed[group])),
          remoteBlockIds: remotes.map((ids, group) => {
            const windowed = cacheSemantics(plan.groups[group] ?? "")?.lists === "window";
            return scattered && windowed ? ids.slice(Math.floor(ids.length / 3)) : ids;
          }),
          numTokens,
          localComputedBlocks: computed,
        },
      };
    }),
  );
}

/** The fewest tokens in a logical block, among groups whose lists hold the whole sequence. */
function logicalTokens(plan: EngineTransferPlan, rank: RankGeometry, other: RankGeometry): number {
  const whole = [...plan.groups.keys()].filter(
    (group) => cacheSemantics(plan.groups[group] ?? "")?.lists === "sequence",
  );
  const tokens = whole.map((group) => tokensInBlock(rank, group, other));
  return (
    (tokens.length === 0 ? rank.kernelBlockSize : Math.min(...tokens)) *
    rank.physicalBlocksPerLogical
  );
}

function poolOf(rank: RankGeometry): number {
  return Math.floor(
    Math.min(...rank.regions.map((region) => region.numBlocks)) / rank.physicalBlocksPerLogical,
  );
}

/** Groups take disjoint parts of the pool: they may share regions. */
function consecutive(groups: number, group: number, count: number, pool: number): number[] {
  const first = Math.floor((group * pool) / groups);
  return Array.from({ length: count }, (_, index) => first + index);
}

function fromTheEnd(pool: number, groups: number, group: number, count: number): number[] {
  const own = Math.floor(pool / groups);
  const step = Math.max(1, Math.floor(own / count));
  const last = Math.floor(((group + 1) * pool) / groups) - 1;
  return Array.from({ length: count }, (_, index) => last - index * step);
}
