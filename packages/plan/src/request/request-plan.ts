import { KvError } from "@kv/interface";
import type { EngineTransferPlan } from "../engine/engine-plan.js";
import type { GroupPlan } from "../engine/group-plans.js";
import type { SourcePlan } from "../engine/source-plans.js";
import {
  buildReceivePass,
  type ReceivePass,
  type ReceivePassGroup,
} from "../receive/build-receive-pass.js";
import { pairDcp } from "./dcp-blocks.js";
import { lookAheadBlocks } from "./look-ahead.js";
import { type PairedBlocks, pairBlocks, partsPerLogical } from "./pair-blocks.js";
import {
  outOfRange,
  type RequestBlocks,
  requireCount,
  requireGroups,
  requireIds,
} from "./request-checks.js";
import {
  type Batch,
  batchOfRuns,
  type ReadIndices,
  type RequestRead,
  readIndices,
  requestRead,
} from "./request-read.js";
import {
  type GroupShape,
  type ReadShape,
  type RequestShape,
  requestShape,
} from "./request-shape.js";
import { addBlockRuns, noRuns, orderForRuns, overlap, type Runs } from "./runs.js";

/** The transfers, notifications and receive pass of one request. */
export interface RequestPlan {
  /**
   * Transfers with at least one descriptor. A transfer carries the notification of its rank when it
   * is the only one for that rank. Of several transfers (one for each type of memory) none does,
   * and the rank is notified when all have landed.
   */
  readonly reads: readonly RequestRead[];
  /** Tensor-parallel ranks of `notify`. */
  readonly notifyRanks: readonly number[];
  /**
   * Remote ranks that are notified and not read: replicas, and source ranks without blocks of this
   * request.
   */
  readonly notify: readonly RemoteRankId[];
  /** Undefined when no block needs a change. */
  readonly receivePass: ReceivePass | undefined;
  /** Descriptors of all reads. */
  readonly descriptorCount: number;
  /** Rows in the `runs` of all reads. */
  readonly runCount: number;
  /** Bytes of all reads. */
  readonly lengthBytes: number;
}

/** One rank of a remote engine. */
export interface RemoteRankId {
  /** Tensor-parallel rank. */
  readonly tpRank: number;
  /** Pipeline stage. */
  readonly ppRank: number;
}

type Batches = readonly (Batch | undefined)[];

/**
 * The transfers, receive pass and notifications of one request. Work and memory grow with the runs
 * of consecutive blocks, not with the blocks. Sources share the arrays `localIds` and `remoteIds`:
 * do not change them.
 *
 * @throws `KV_BLOCKS_MISMATCH` (lists that cannot be paired; both lengths),
 * `KV_BLOCKS_OUT_OF_RANGE` (an id outside of its regions, or a local block that is listed twice).
 */
export function planRequest(plan: EngineTransferPlan, given: RequestBlocks): RequestPlan {
  const isWanted = ({ localBlockIds }: RequestBlocks) =>
    localBlockIds.some((ids) => ids.length > 0);
  if (!isWanted(given)) return notifyOnly(plan);
  requireGroups(plan, "local", given.localBlockIds);
  requireGroups(plan, "remote", given.remoteBlockIds);
  if (given.numTokens !== undefined) requireCount("numTokens", given.numTokens, 1);

  const shape = requestShape(plan);
  const blocks = ofThisStage(plan, shape, given);
  if (!isWanted(blocks)) return notifyOnly(plan);
  requireLists(plan, shape, blocks);
  const sharded = (plan.local.dcpSize ?? 1) > 1 || (plan.remote.dcpSize ?? 1) > 1;
  const pass: ReceivePassGroup[] = [];
  // Under DCP each source has blocks of its own; otherwise all sources have the same.
  const batches = sharded
    ? pairDcp(plan, shape, blocks, pass)
    : [pairAll(plan, shape, blocks, pass)];
  const indices: ReadIndices[] = [];
  const reads: RequestRead[] = [];
  let [runCount, descriptorCount, lengthBytes] = [0, 0, 0];
  for (const [index, read] of shape.reads.entries()) {
    const { sourceIndex, listIndex } = read;
    const same = read.sameAs === undefined ? undefined : indices[read.sameAs];
    const made = sharded
      ? readIndices(shape.reads[read.sameAs ?? index] as ReadShape, batches[sourceIndex] as Batches)
      : (same ?? readIndices(read, batches[0] as Batches));
    indices.push(made);
    if (made.descriptorCount === 0) continue;
    const { remoteRank, remotePpRank } = plan.sources[sourceIndex] as SourcePlan;
    reads.push(requestRead(made, { remoteRank, remotePpRank, sourceIndex, listIndex }));
    runCount += made.runCount;
    descriptorCount += made.descriptorCount;
    lengthBytes += made.lengthBytes;
  }
  const notify = unread(plan, reads);
  return {
    reads,
    notifyRanks: notify.map(({ tpRank }) => tpRank),
    notify,
    receivePass: pass.length === 0 ? undefined : { groups: pass },
    descriptorCount,
    runCount,
    lengthBytes,
  };
}

function notifyOnly(plan: EngineTransferPlan): RequestPlan {
  const notify = unread(plan, []);
  return {
    reads: [],
    notifyRanks: notify.map(({ tpRank }) => tpRank),
    notify,
    receivePass: undefined,
    descriptorCount: 0,
    runCount: 0,
    lengthBytes: 0,
  };
}

/**
 * Remote ranks to notify without a read: sources without blocks of this request, then ranks that
 * are never read.
 */
function unread(plan: EngineTransferPlan, reads: readonly RequestRead[]): RemoteRankId[] {
  const ranks: RemoteRankId[] = [];
  for (const { remoteRank: tpRank, remotePpRank: ppRank } of plan.sources) {
    const isRead = reads.some((read) => read.remoteRank === tpRank && read.remotePpRank === ppRank);
    if (!isRead) ranks.push({ tpRank, ppRank });
  }
  for (const ppRank of plan.stages) {
    for (const tpRank of plan.notifyOnlyRanks) ranks.push({ tpRank, ppRank });
  }
  return ranks;
}

/** The blocks of the local pipeline stage: other stages move the groups whose regions they hold. */
function ofThisStage(
  plan: EngineTransferPlan,
  shape: RequestShape,
  blocks: RequestBlocks,
): RequestBlocks {
  if ((plan.local.ppSize ?? 1) === 1 || shape.groups.every(({ batch }) => batch !== undefined))
    return blocks;
  return {
    ...blocks,
    localBlockIds: blocks.localBlockIds.map((ids, group) =>
      shape.groups[group]?.batch === undefined ? [] : ids,
    ),
  };
}

function requireLists(plan: EngineTransferPlan, shape: RequestShape, blocks: RequestBlocks): void {
  for (const [group, localIds] of blocks.localBlockIds.entries()) {
    if (localIds.length === 0) continue;
    const computedBlocks = blocks.localComputedBlocks?.[group];
    if (computedBlocks !== undefined)
      requireCount(`localComputedBlocks of group ${group}`, computedBlocks, 0);
    const limits = shape.groups[group] as GroupShape;
    if (limits.batch === undefined) {
      throw new KvError(
        "KV_BLOCKS_MISMATCH",
        `group ${group} has blocks, and no region holds them`,
        {
          details: { group, kind: plan.groups[group] },
        },
      );
    }
    requireIds(group, "local", localIds, limits.localBlocks);
    requireIds(
      group,
      "remote",
      blocks.remoteBlockIds[group] as readonly number[],
      limits.remoteBlocks,
    );
  }
}

/**
 * The runs of all groups in batches, which are the same for every source. Adds each group's receive
 * pass to `pass`.
 */
function pairAll(
  plan: EngineTransferPlan,
  shape: RequestShape,
  blocks: RequestBlocks,
  pass: ReceivePassGroup[],
): Batches {
  const runs: (Runs | undefined)[] = new Array(shape.batchCount).fill(undefined);
  const extra = lookAheadBlocks(plan, blocks);
  for (const [group, localIds] of blocks.localBlockIds.entries()) {
    if (localIds.length === 0) continue;
    const { batch } = shape.groups[group] as { batch: number };
    const given = blocks.remoteBlockIds[group] as readonly number[];
    const lookAhead = extra[group] ?? 0;
    const remoteIds = lookAhead === 0 ? given : given.slice(0, -lookAhead);
    const pairs = pairBlocks(plan, {
      group,
      localIds,
      remoteIds,
      numTokens: blocks.numTokens,
      computedBlocks: blocks.localComputedBlocks?.[group],
      lookAhead,
    });
    requireApart(plan, group, localIds, pairs);
    const groupPass = buildReceivePass(plan, group, localIds, pairs);
    if (groupPass !== undefined) pass.push(groupPass);
    const into = runs[batch] ?? noRuns();
    runs[batch] = into;
    const per = partsPerLogical(plan.groupPlans[group] as GroupPlan);
    addBlockRuns(into, {
      localIds,
      remoteIds,
      localPer: per.local,
      remotePer: per.remote,
      ...pairs,
    });
  }
  return runs.map((all, batch) => {
    if (all === undefined) return undefined;
    const ordered = orderForRuns(all);
    requireOnce(plan, shape, batch, ordered);
    return batchOfRuns(ordered);
  });
}

/**
 * Refuses a block that is listed both before the remote's window, where it is zeroed, and within
 * it, where it is filled.
 */
function requireApart(
  plan: EngineTransferPlan,
  group: number,
  localIds: readonly number[],
  { localStart }: PairedBlocks,
): void {
  const first = Math.floor(localStart / partsPerLogical(plan.groupPlans[group] as GroupPlan).local);
  if (first === 0) return;
  const filled = new Set(localIds.slice(first));
  const block = localIds.slice(0, first).find((id) => filled.has(id));
  if (block === undefined) return;
  throw outOfRange(
    `group ${group}: local block ${block} is listed both before the remote's window and within it`,
    { group, block },
  );
}

function requireOnce(
  plan: EngineTransferPlan,
  shape: RequestShape,
  batch: number,
  runs: Runs,
): void {
  const part = overlap(runs);
  if (part === undefined) return;
  const group = shape.groups.findIndex((one) => one.batch === batch);
  const block = Math.floor(part / (plan.groupPlans[group] as GroupPlan).localParts);
  throw outOfRange(`local kernel block ${block} is to be filled twice by one request`, { block });
}
