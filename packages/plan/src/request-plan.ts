import { KvError } from "@kv/interface";
import type { EngineTransferPlan } from "./engine-plan-types.js";
import { expandIds } from "./id-kernel.js";
import { type PairedBlocks, pairBlocks } from "./pair-blocks.js";
import { receivePassOf } from "./receive-pass-of.js";
import { outOfRange, requireCount, requireGroups, requireIds } from "./request-checks.js";
import type { ReceivePassGroup, RequestBlocks, RequestPlan, RequestRead } from "./request-plan-types.js";
import { type BatchShape, requestShape } from "./request-shape.js";
import { countRuns, orderForRuns } from "./run-order.js";

/** Pairs of groups that live in the same regions, handled as one list. */
interface Batch {
  readonly shape: BatchShape;
  readonly localParts: Int32Array;
  readonly remoteBlocks: Int32Array;
}

/**
 * One request's transfers, receive pass and notifications. All sources share the same id arrays: do not change them. Errors:
 * `KV_BLOCKS_MISMATCH` (lists that cannot be paired, both lengths named), `KV_BLOCKS_OUT_OF_RANGE` (an id outside of its
 * regions, or the same local block twice).
 */
export function planRequest(plan: EngineTransferPlan, blocks: RequestBlocks): RequestPlan {
  const wanted = blocks.localBlockIds.some((ids) => ids.length > 0);
  if (!wanted) {
    const notifyRanks = [...plan.mapping.allSourceRanks, ...plan.notifyOnlyRanks];
    return {
      reads: [],
      notifyRanks,
      receivePass: undefined,
      descriptorCount: 0,
      runCount: 0,
      lengthBytes: 0,
    };
  }
  requireGroups(plan, "local", blocks.localBlockIds);
  requireGroups(plan, "remote", blocks.remoteBlockIds);
  if (blocks.numTokens !== undefined) requireCount("numTokens", blocks.numTokens, 1);

  const shapes = requestShape(plan);
  const byBatch = new Map<BatchShape, PairedBlocks[]>();
  const pass: ReceivePassGroup[] = [];
  for (const [group, localIds] of blocks.localBlockIds.entries()) {
    if (localIds.length === 0) continue;
    const computedBlocks = blocks.localComputedBlocks?.[group];
    if (computedBlocks !== undefined)
      requireCount(`localComputedBlocks of group ${group}`, computedBlocks, 0);
    const remoteIds = blocks.remoteBlockIds[group] ?? [];
    const shape = shapes[group];
    if (shape?.batch === undefined) {
      throw new KvError("KV_BLOCKS_MISMATCH", `group ${group} has blocks and no region to hold them`, {
        details: { group },
      });
    }
    requireIds(group, "local", localIds, shape.localBlocks);
    requireIds(group, "remote", remoteIds, shape.remoteBlocks);
    const pairs = pairBlocks(plan, {
      group,
      localIds,
      remoteIds,
      numTokens: blocks.numTokens,
      computedBlocks,
    });
    const groupPass = receivePassOf(plan, group, localIds, pairs);
    if (groupPass !== undefined) pass.push(groupPass);
    byBatch.set(shape.batch, [...(byBatch.get(shape.batch) ?? []), pairs]);
  }
  const batches = [...byBatch].map(([shape, pairs]) => batchOf(plan, shape, pairs));
  const localIds = descriptorIds(batches, plan.blockSizeRatio, "localParts", "localSpans");
  const remoteIds = descriptorIds(batches, 1, "remoteBlocks", "remoteSpans");
  const lengthBytes = batches.reduce(
    (sum, { shape, localParts }) => sum + shape.partBytes * localParts.length,
    0,
  );
  const reads: RequestRead[] = plan.sources.map((source, sourceIndex) => ({
    remoteRank: source.remoteRank,
    sourceIndex,
    localIds,
    remoteIds,
    lengthBytes: lengthBytes / plan.sources.length,
  }));
  const runs = batches.reduce((sum, { shape, localParts, remoteBlocks }) => {
    return sum + countRuns(localParts, remoteBlocks) * shape.regionCount;
  }, 0);
  return {
    reads,
    notifyRanks: [...plan.notifyOnlyRanks],
    receivePass: pass.length === 0 ? undefined : { groups: pass },
    descriptorCount: localIds.length * reads.length,
    runCount: runs * reads.length,
    lengthBytes,
  };
}

function batchOf(plan: EngineTransferPlan, shape: BatchShape, pairs: readonly PairedBlocks[]): Batch {
  const localParts = joined(pairs.map((pair) => pair.localParts));
  const remoteBlocks = joined(pairs.map((pair) => pair.remoteBlocks));
  orderForRuns(localParts, remoteBlocks);
  for (let index = 1; index < localParts.length; index++) {
    if (localParts[index] !== localParts[index - 1]) continue;
    const block = Math.floor((localParts[index] as number) / plan.blockSizeRatio);
    throw outOfRange(`local kernel block ${block} is to be filled twice by one request`, { block });
  }
  return { shape, localParts, remoteBlocks };
}

/** A single list is not copied: it belongs to the pairing, which has no further use of its order. */
function joined(parts: readonly Int32Array[]): Int32Array {
  const [first] = parts;
  if (parts.length === 1 && first !== undefined) return first;
  const all = new Int32Array(parts.reduce((sum, part) => sum + part.length, 0));
  let cursor = 0;
  for (const part of parts) {
    all.set(part, cursor);
    cursor += part.length;
  }
  return all;
}

/** Region by region. */
function descriptorIds(
  batches: readonly Batch[],
  parts: number,
  which: "localParts" | "remoteBlocks",
  spans: "localSpans" | "remoteSpans",
): Int32Array {
  const out = new Int32Array(
    batches.reduce((sum, batch) => sum + batch[which].length * batch.shape.regionCount, 0),
  );
  let cursor = 0;
  for (const batch of batches) {
    for (const { blockStep, partStep, offsets } of batch.shape[spans]) {
      cursor = expandIds(out, cursor, stepped(batch[which], parts, blockStep, partStep), offsets);
    }
  }
  return out;
}

function stepped(ids: Int32Array, parts: number, blockStep: number, partStep: number): Int32Array {
  if (blockStep === parts && partStep === 1) return ids;
  return ids.map((id) => {
    const part = id % parts;
    return ((id - part) / parts) * blockStep + part * partStep;
  });
}
