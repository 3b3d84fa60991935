import type { EngineTransferPlan } from "../engine/engine-plan.js";
import type { GroupPlan } from "../engine/group-plans.js";
import { type PairedBlocks, partsPerLogical } from "./pair-blocks.js";
import { mismatch, type RequestBlocks } from "./request-blocks.js";
import type { BlockLists } from "./request-read.js";

/**
 * The blocks of a group that each source fills, and their extent. A sequence's blocks go in turn to
 * the ranks of a DCP group. (vLLM 0.33: `_apply_dcp_prefix_caching`, on logical blocks.)
 *
 * @throws `KV_BLOCKS_MISMATCH`.
 */
export function pairDcp(
  plan: EngineTransferPlan,
  group: number,
  blocks: RequestBlocks,
): { readonly lists: readonly BlockLists[]; readonly filled: PairedBlocks } {
  const [dcpSize, remoteDcpSize] = [plan.local.dcpSize ?? 1, plan.remote.dcpSize ?? 1];
  const dcpRank = plan.local.tpRank % dcpSize;
  const groupPlan = plan.groupPlans[group] as GroupPlan;
  const { localBlockTokens } = groupPlan;
  const per = partsPerLogical(groupPlan);
  const localIds = blocks.localBlockIds[group] as readonly number[];
  const remoteIds = blocks.remoteBlockIds[group] as readonly number[];
  const { numTokens } = blocks;
  const computed = computedBlocks(plan, group, blocks);
  const end = numTokens === undefined ? undefined : Math.ceil(numTokens / localBlockTokens);
  const mine = { ids: localIds, first: computed * dcpSize + dcpRank, step: dcpSize };
  const covered = new Set<number>();
  const lists = plan.sources.map(({ remoteRank }): BlockLists => {
    // The rank within its DCP group, which may be smaller than the engine.
    const theirs = { ids: remoteIds, first: remoteRank % remoteDcpSize, step: remoteDcpSize };
    const paired = pairDealt(mine, theirs, end);
    for (const id of paired.localIds) covered.add(id);
    const count = paired.localIds.length * per.localPer;
    return { ...paired, ...per, localStart: 0, remoteStart: 0, count };
  });
  let validTokens = 0;
  for (const [index, block] of localIds.entries()) {
    const begin = ((computed + index) * dcpSize + dcpRank) * localBlockTokens;
    const left = numTokens === undefined ? localBlockTokens : Math.max(0, numTokens - begin);
    if (covered.has(block)) validTokens += Math.min(left, localBlockTokens);
    else if (left > 0 && numTokens !== undefined)
      throw mismatch(`group ${group}: no remote rank covers local block ${block}`, {
        group,
        block,
      });
  }
  const count = covered.size * per.localPer;
  return { lists, filled: { localStart: 0, remoteStart: 0, count, validTokens } };
}

/**
 * Local blocks before the list, by which both lists end together unless given. All ranks of a DCP
 * group have the same list.
 */
function computedBlocks(plan: EngineTransferPlan, group: number, blocks: RequestBlocks): number {
  const given = blocks.localComputedBlocks?.[group];
  if (given !== undefined) return given;
  const { localBlockTokens } = plan.groupPlans[group] as GroupPlan;
  const [dcpSize, remoteDcpSize] = [plan.local.dcpSize ?? 1, plan.remote.dcpSize ?? 1];
  const { numTokens, localBlockIds, remoteBlockIds } = blocks;
  const wanted = localBlockIds[group]?.length ?? 0;
  const held = remoteBlockIds[group]?.length ?? 0;
  let whole: number | undefined;
  if (numTokens !== undefined) whole = Math.ceil(numTokens / (localBlockTokens * dcpSize));
  else if (dcpSize === remoteDcpSize) whole = held;
  if (whole !== undefined && whole >= wanted) return whole - wanted;
  throw mismatch(
    `group ${group}: with ${wanted} local blocks (DCP ${dcpSize}) and ${held} remote ones (DCP ${remoteDcpSize}) the number of blocks ` +
      `before the local ones is ambiguous (tokens: ${numTokens ?? "unknown"})`,
    { group, localBlocks: wanted, remoteBlocks: held, numTokens: numTokens ?? null },
  );
}

/** A rank's blocks of a sequence: `ids[index]` is the sequence's block `first + index * step`. */
export interface DealtBlocks {
  readonly ids: readonly number[];
  readonly first: number;
  readonly step: number;
}

/**
 * Pairs the blocks with the same position in the sequence, up to `end`, its number of blocks (vLLM
 * 0.33, `_apply_dcp_prefix_caching`).
 */
export function pairDealt(
  local: DealtBlocks,
  remote: DealtBlocks,
  end = Number.POSITIVE_INFINITY,
): { readonly localIds: readonly number[]; readonly remoteIds: readonly number[] } {
  const [localIds, remoteIds]: [number[], number[]] = [[], []];
  for (const [index, id] of local.ids.entries()) {
    const position = local.first + index * local.step;
    // The block of another rank has no whole index.
    const held = remote.ids[(position - remote.first) / remote.step];
    if (held === undefined || position >= end) continue;
    localIds.push(id);
    remoteIds.push(held);
  }
  return { localIds, remoteIds };
}
