import { KvError } from "@kv/interface";
import type { EngineTransferPlan } from "../engine/engine-plan.js";
import type { GroupPlan } from "../engine/group-plans.js";
import type { ReceivePassGroup } from "../receive/build-receive-pass.js";
import { partsPerLogical } from "./pair-blocks.js";
import { mismatch, outOfRange, type RequestBlocks } from "./request-checks.js";
import { type Batch, batchOfRuns } from "./request-read.js";
import type { RequestShape } from "./request-shape.js";
import { addBlockRuns, noRuns, orderForRuns, type Runs } from "./runs.js";

/**
 * The runs of a request in batches, by source. The blocks of a sequence go in turn to the ranks of
 * a DCP group, so each source has different blocks. Adds each group's receive pass to `pass`. (vLLM
 * 0.33: `_apply_dcp_prefix_caching`, on logical blocks.)
 *
 * @throws `KV_BLOCKS_MISMATCH`, `KV_BLOCKS_OUT_OF_RANGE`.
 */
export function pairDcp(
  plan: EngineTransferPlan,
  shape: RequestShape,
  blocks: RequestBlocks,
  pass: ReceivePassGroup[],
): readonly (readonly (Batch | undefined)[])[] {
  const [localDcpSize, remoteDcpSize] = [plan.local.dcpSize ?? 1, plan.remote.dcpSize ?? 1];
  const localDcpRank = plan.local.tpRank % localDcpSize;
  const bySource = plan.sources.map(() =>
    new Array<Runs | undefined>(shape.batchCount).fill(undefined),
  );
  const given = Array.from({ length: shape.batchCount }, () => new Set<number>());
  for (const [group, localIds] of blocks.localBlockIds.entries()) {
    if (localIds.length === 0) continue;
    const groupPlan = plan.groupPlans[group] as GroupPlan;
    const { batch } = shape.groups[group] as { batch: number };
    requireNew(localIds, given[batch] as Set<number>);
    const remoteIds = blocks.remoteBlockIds[group] as readonly number[];
    const computed = computedBlocks(plan, group, blocks);
    const sequenceBlocks =
      blocks.numTokens === undefined
        ? undefined
        : Math.ceil(blocks.numTokens / groupPlan.localBlockTokens);
    const per = partsPerLogical(groupPlan);
    const covered = new Set<number>();
    for (const [index, source] of plan.sources.entries()) {
      const matched = applyDcpPrefixCaching({
        localIds,
        remoteIds,
        // The rank within its DCP group: several ranks hold the same slice where groups are smaller
        // than the engine.
        remoteRank: source.remoteRank % remoteDcpSize,
        localDcpSize,
        localDcpRank,
        remoteDcpSize,
        localNumComputedBlocks: computed,
        numRemoteBlocks: sequenceBlocks,
      });
      for (const id of matched.localIds) covered.add(id);
      const count = matched.localIds.length * per.local;
      if (count === 0) continue;
      const runs = bySource[index] as (Runs | undefined)[];
      const into = runs[batch] ?? noRuns();
      runs[batch] = into;
      addBlockRuns(into, {
        ...matched,
        localPer: per.local,
        remotePer: per.remote,
        localStart: 0,
        remoteStart: 0,
        count,
      });
    }
    const own = groupPass(plan, group, localIds, {
      computed,
      covered,
      numTokens: blocks.numTokens,
    });
    if (own !== undefined) pass.push(own);
  }
  return bySource.map((batches) =>
    batches.map((runs) => (runs === undefined ? undefined : batchOfRuns(orderForRuns(runs)))),
  );
}

/**
 * Local blocks before the first of the list: as given, or the number with which both lists end
 * together. All ranks of a DCP group have the same list.
 */
function computedBlocks(plan: EngineTransferPlan, group: number, blocks: RequestBlocks): number {
  const given = blocks.localComputedBlocks?.[group];
  if (given !== undefined) return given;
  const { local, remote, groupPlans } = plan;
  const { localBlockTokens } = groupPlans[group] as GroupPlan;
  const [dcpSize, remoteDcpSize] = [local.dcpSize ?? 1, remote.dcpSize ?? 1];
  const { numTokens } = blocks;
  const [wanted, held] = [blocks.localBlockIds, blocks.remoteBlockIds].map(
    (ids) => ids[group]?.length ?? 0,
  );
  let whole: number | undefined;
  if (numTokens !== undefined) whole = Math.ceil(numTokens / (localBlockTokens * dcpSize));
  else if (dcpSize === remoteDcpSize) whole = held;
  if (whole !== undefined && whole >= (wanted as number)) return whole - (wanted as number);
  throw mismatch(
    `group ${group}: with ${wanted} local blocks (DCP ${dcpSize}) and ${held} remote ones (DCP ${remoteDcpSize}) the number of blocks ` +
      `before the local ones is ambiguous (tokens: ${numTokens ?? "unknown"})`,
    { group, localBlocks: wanted, remoteBlocks: held, numTokens: numTokens ?? null },
  );
}

/**
 * Refuses a local block that is listed twice. The two may come from two sources, so the runs of one
 * source would not show it.
 */
function requireNew(localIds: readonly number[], given: Set<number>): void {
  for (const id of localIds) {
    if (given.has(id))
      throw outOfRange(`local block ${id} is to be filled twice by one request`, { block: id });
    given.add(id);
  }
}

/**
 * The receive pass of a group: blocks that no source covers, and tokens beyond the request's last.
 */
function groupPass(
  plan: EngineTransferPlan,
  group: number,
  localIds: readonly number[],
  {
    computed,
    covered,
    numTokens,
  }: { computed: number; covered: ReadonlySet<number>; numTokens: number | undefined },
): ReceivePassGroup | undefined {
  const { localBlockTokens, localPerLogical, partTokens, localParts } = plan.groupPlans[
    group
  ] as GroupPlan;
  const dcpSize = plan.local.dcpSize ?? 1;
  const dcpRank = plan.local.tpRank % dcpSize;
  const kernelTokens = partTokens * localParts;
  const zero: number[] = [];
  let partialBlock: ReceivePassGroup["partialBlock"];
  for (const [index, id] of localIds.entries()) {
    const begin = ((computed + index) * dcpSize + dcpRank) * localBlockTokens;
    const wanted = Math.max(0, (numTokens ?? Number.POSITIVE_INFINITY) - begin);
    if (!covered.has(id) && wanted > 0 && numTokens !== undefined) {
      throw mismatch(`group ${group}: no remote rank covers local block ${id}`, {
        group,
        block: id,
      });
    }
    const valid = covered.has(id) ? Math.min(wanted, localBlockTokens) : 0;
    for (let kernel = 0; kernel < localPerLogical; kernel++) {
      const tokens = Math.min(kernelTokens, Math.max(0, valid - kernel * kernelTokens));
      const blockId = id * localPerLogical + kernel;
      if (tokens === 0) zero.push(blockId);
      else if (tokens < kernelTokens) partialBlock = { blockId, fromToken: tokens };
    }
  }
  if (plan.uncovered !== "zeroed" || (zero.length === 0 && partialBlock === undefined))
    return undefined;
  return {
    group,
    permuteBlockIds: new Int32Array(0),
    zeroBlockIds: Int32Array.from(zero),
    ...(partialBlock === undefined ? {} : { partialBlock }),
  };
}

/**
 * The slices of one sequence on a local and a remote rank. Its blocks go in turn to the ranks of a
 * DCP group.
 */
export interface DcpSlices {
  readonly localIds: readonly number[];
  /** The remote rank's blocks of the whole sequence. */
  readonly remoteIds: readonly number[];
  readonly remoteRank: number;
  readonly localDcpSize: number;
  readonly localDcpRank: number;
  readonly remoteDcpSize: number;
  readonly localNumComputedBlocks: number;
  /**
   * Blocks of the whole sequence without allocation padding. Where it is given, every block of the
   * sequence must be covered.
   */
  readonly numRemoteBlocks?: number | undefined;
}

/**
 * Pairs the blocks of both slices that have the same position in the sequence (vLLM 0.33,
 * `_apply_dcp_prefix_caching`).
 *
 * @throws `KV_BLOCKS_MISMATCH` when the remote blocks do not cover the local ones.
 */
export function applyDcpPrefixCaching(slices: DcpSlices): {
  localIds: number[];
  remoteIds: number[];
} {
  const {
    remoteIds,
    localDcpSize,
    localDcpRank,
    remoteDcpSize,
    localNumComputedBlocks: computed,
  } = slices;
  const { localIds, numRemoteBlocks } = slices;
  const wanted =
    numRemoteBlocks === undefined
      ? localIds
      : localIds.slice(
          0,
          Math.max(0, Math.ceil((numRemoteBlocks - localDcpRank) / localDcpSize) - computed),
        );
  let local: number[];
  let remote: number[];
  if (localDcpSize <= remoteDcpSize) {
    const step = Math.floor(remoteDcpSize / localDcpSize);
    const phase =
      localDcpSize === remoteDcpSize
        ? 0
        : Math.floor((slices.remoteRank - localDcpRank) / localDcpSize);
    const first = modulo(phase - computed, step);
    local = everyNth(wanted, first, step);
    remote = everyNth(remoteIds, Math.floor((computed + first - phase) / step), 1);
  } else {
    const step = Math.floor(localDcpSize / remoteDcpSize);
    const phase = Math.floor((localDcpRank - (slices.remoteRank % remoteDcpSize)) / remoteDcpSize);
    local = [...wanted];
    remote = everyNth(remoteIds, phase + computed * step, step);
  }
  const matched = Math.min(local.length, remote.length);
  if (numRemoteBlocks !== undefined && matched < local.length) {
    throw new KvError(
      "KV_BLOCKS_MISMATCH",
      `remote rank ${slices.remoteRank} covers ${matched} of the ${local.length} blocks wanted from it`,
      { details: { remoteRank: slices.remoteRank, wanted: local.length, covered: matched } },
    );
  }
  return { localIds: local.slice(0, matched), remoteIds: remote.slice(0, matched) };
}

/**
 * Elements `start`, `start + step`, and so on. A negative start, which only ranks without overlap
 * have, counts from the end.
 */
function everyNth(ids: readonly number[], start: number, step: number): number[] {
  const first = start < 0 ? Math.max(0, start + ids.length) : start;
  const picked: number[] = [];
  for (const [index, id] of ids.entries())
    if (index >= first && (index - first) % step === 0) picked.push(id);
  return picked;
}

function modulo(value: number, divisor: number): number {
  return ((value % divisor) + divisor) % divisor;
}
