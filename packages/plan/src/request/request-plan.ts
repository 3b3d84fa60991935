import { KvError } from "@kv/interface";
import type { EngineTransferPlan } from "../engine/engine-plan.js";
import type { GroupPlan } from "../engine/group-plans.js";
import { pairDcp } from "./dcp-blocks.js";
import { lookAheadBlocks, pairBlocks, partsPerLogical } from "./pair-blocks.js";
import { buildReceivePass, type ReceivePass, type ReceivePassGroup } from "./receive-pass.js";
import {
  outOfRange,
  type RequestBlocks,
  requireCount,
  requireGroups,
  requireIds,
} from "./request-blocks.js";
import {
  type BatchShape,
  type GroupShape,
  overlap,
  ReadIds,
  type RequestRead,
  type RequestShape,
  Runs,
  requestRead,
  requestShape,
} from "./request-read.js";

/** The transfers, notifications and receive pass of one request. */
export interface RequestPlan {
  /**
   * Transfers with at least one descriptor. A rank's only transfer carries its notification. With
   * several (one for each type of memory), notify the rank when all have landed.
   */
  readonly reads: readonly RequestRead[];
  readonly notifyRanks: readonly number[];
  /**
   * Remote ranks to notify without a read: replicas, and sources without blocks of this request.
   */
  readonly notify: readonly RemoteRankId[];
  /** Undefined when no block needs a change. */
  readonly receivePass: ReceivePass | undefined;
  readonly descriptorCount: number;
  readonly runCount: number;
  readonly lengthBytes: number;
}

/** One rank of a remote engine. */
export interface RemoteRankId {
  readonly tpRank: number;
  readonly ppRank: number;
}

const NOTHING = { reads: [], receivePass: undefined, runCount: 0 };

/**
 * Plans the transfers, receive pass and notifications of one request. Work and memory grow with
 * runs of consecutive blocks, not with blocks. Sources share id arrays: do not change them.
 *
 * @throws `KV_BLOCKS_MISMATCH` with both lengths for lists that cannot be paired,
 * `KV_BLOCKS_OUT_OF_RANGE` for an id outside its regions or a local block that is listed twice.
 */
export function planRequest(plan: EngineTransferPlan, given: RequestBlocks): RequestPlan {
  const isWanted = ({ localBlockIds }: RequestBlocks) =>
    localBlockIds.some((ids) => ids.length > 0);
  if (!isWanted(given)) return withNotify(plan, NOTHING);
  requireGroups(plan, "local", given.localBlockIds);
  requireGroups(plan, "remote", given.remoteBlockIds);
  if (given.numTokens !== undefined) requireCount("numTokens", given.numTokens, 1);

  const shape = requestShape(plan);
  const blocks = ofThisStage(plan, shape, given);
  if (!isWanted(blocks)) return withNotify(plan, NOTHING);
  requireLists(plan, shape, blocks);
  const { rows, pass } = pairRequest(plan, shape, blocks);
  const isDealt = rows.length > 1;
  const shared = new Map<readonly BatchShape[], ReadIds>();
  const reads: RequestRead[] = [];
  let runCount = 0;
  for (const { place, batches } of shape.reads) {
    let ids = shared.get(batches);
    if (ids === undefined || isDealt)
      ids = new ReadIds(batches, rows[isDealt ? place.sourceIndex : 0] as BatchRows);
    shared.set(batches, ids);
    if (ids.descriptorCount === 0) continue;
    reads.push(requestRead(place, ids));
    runCount += ids.runCount;
  }
  const receivePass = pass.length === 0 ? undefined : { groups: pass };
  return withNotify(plan, { reads, receivePass, runCount });
}

function withNotify(
  plan: EngineTransferPlan,
  found: Pick<RequestPlan, "reads" | "receivePass" | "runCount">,
): RequestPlan {
  const { reads } = found;
  const notify = plan.sources
    .map(({ remoteRank: tpRank, remotePpRank: ppRank }) => ({ tpRank, ppRank }))
    .filter(
      ({ tpRank, ppRank }) =>
        !reads.some((read) => read.remoteRank === tpRank && read.remotePpRank === ppRank),
    );
  for (const ppRank of plan.stages)
    for (const tpRank of plan.notifyOnlyRanks) notify.push({ tpRank, ppRank });
  return {
    ...found,
    notify,
    notifyRanks: notify.map(({ tpRank }) => tpRank),
    descriptorCount: reads.reduce((sum, read) => sum + read.descriptorCount, 0),
    lengthBytes: reads.reduce((sum, read) => sum + read.lengthBytes, 0),
  };
}

function ofThisStage(
  plan: EngineTransferPlan,
  { groups }: RequestShape,
  blocks: RequestBlocks,
): RequestBlocks {
  if ((plan.local.ppSize ?? 1) === 1) return blocks;
  const localBlockIds = blocks.localBlockIds.map((ids, group) =>
    groups[group]?.batch === undefined ? [] : ids,
  );
  return { ...blocks, localBlockIds };
}

function requireLists(plan: EngineTransferPlan, shape: RequestShape, blocks: RequestBlocks): void {
  for (const [group, localIds] of blocks.localBlockIds.entries()) {
    if (localIds.length === 0) continue;
    const computedBlocks = blocks.localComputedBlocks?.[group];
    if (computedBlocks !== undefined)
      requireCount(`localComputedBlocks of group ${group}`, computedBlocks, 0);
    const { batch, localBlocks, remoteBlocks } = shape.groups[group] as GroupShape;
    if (batch === undefined) {
      throw new KvError(
        "KV_BLOCKS_MISMATCH",
        `group ${group} has blocks, and no region holds them`,
        { details: { group, kind: plan.groups[group] } },
      );
    }
    requireIds(group, "local", localIds, localBlocks);
    requireIds(group, "remote", blocks.remoteBlockIds[group] ?? [], remoteBlocks);
  }
}

/** By batch: its ordered runs; undefined where the request has no blocks of it. */
type BatchRows = readonly (Int32Array | undefined)[];

/** Under DCP `rows` are by source, as each has its own blocks; otherwise one entry serves all. */
export function pairRequest(
  plan: EngineTransferPlan,
  shape: RequestShape,
  blocks: RequestBlocks,
): { readonly rows: readonly BatchRows[]; readonly pass: readonly ReceivePassGroup[] } {
  const isDealt = (plan.local.dcpSize ?? 1) > 1 || (plan.remote.dcpSize ?? 1) > 1;
  const pass: ReceivePassGroup[] = [];
  const runs = Array.from({ length: isDealt ? plan.sources.length : 1 }, () =>
    new Array<Runs | undefined>(shape.batchCount).fill(undefined),
  );
  const listed = shape.groups.map(() => new Set<number>());
  const extra = isDealt ? [] : lookAheadBlocks(plan, blocks);
  for (const [group, localIds] of blocks.localBlockIds.entries()) {
    if (localIds.length === 0) continue;
    const { batch } = shape.groups[group] as { batch: number };
    // Two sources may fill one block, which the runs of one would not show.
    if (isDealt) requireNew(localIds, listed[batch] as Set<number>);
    const { lists, filled } = isDealt
      ? pairDcp(plan, group, blocks)
      : pairGroup(plan, group, blocks, extra[group] ?? 0);
    const groupPass = buildReceivePass(plan, group, localIds, filled);
    if (groupPass !== undefined) pass.push(groupPass);
    for (const [index, list] of lists.entries()) {
      if (list.count === 0) continue;
      const own = runs[index] as (Runs | undefined)[];
      own[batch] ??= new Runs();
      own[batch].addBlocks(list);
    }
  }
  const rows = runs.map((batches) =>
    batches.map((all, batch) => {
      const ordered = all?.ordered();
      if (ordered !== undefined) requireOnce(plan, shape, batch, ordered);
      return ordered;
    }),
  );
  return { rows, pass };
}

function pairGroup(
  plan: EngineTransferPlan,
  group: number,
  blocks: RequestBlocks,
  lookAhead: number,
): ReturnType<typeof pairDcp> {
  const groupPlan = plan.groupPlans[group] as GroupPlan;
  const localIds = blocks.localBlockIds[group] as readonly number[];
  const given = blocks.remoteBlockIds[group] as readonly number[];
  const remoteIds = lookAhead === 0 ? given : given.slice(0, -lookAhead);
  const { numTokens } = blocks;
  const computedBlocks = blocks.localComputedBlocks?.[group];
  const own = { group, localIds, remoteIds, numTokens, computedBlocks, lookAhead };
  const filled = pairBlocks(groupPlan, own);
  const per = partsPerLogical(groupPlan);
  requireApart(group, localIds, Math.floor(filled.localStart / per.localPer));
  return { lists: [{ localIds, remoteIds, ...per, ...filled }], filled };
}

/**
 * Blocks before the remote's window are zeroed, so they must not be among those within it, from
 * `first` on.
 */
function requireApart(group: number, localIds: readonly number[], first: number): void {
  if (first === 0) return;
  const filled = new Set(localIds.slice(first));
  const block = localIds.slice(0, first).find((id) => filled.has(id));
  if (block === undefined) return;
  throw outOfRange(
    `group ${group}: local block ${block} is listed both before the remote's window and within it`,
    { group, block },
  );
}

function requireNew(localIds: readonly number[], listed: Set<number>): void {
  for (const block of localIds) {
    if (listed.has(block))
      throw outOfRange(`local block ${block} is to be filled twice by one request`, { block });
    listed.add(block);
  }
}

function requireOnce(
  plan: EngineTransferPlan,
  shape: RequestShape,
  batch: number,
  rows: Int32Array,
): void {
  const part = overlap(rows);
  if (part === undefined) return;
  const group = shape.groups.findIndex((one) => one.batch === batch);
  const block = Math.floor(part / (plan.groupPlans[group] as GroupPlan).localParts);
  throw outOfRange(`local kernel block ${block} is to be filled twice by one request`, { block });
}
