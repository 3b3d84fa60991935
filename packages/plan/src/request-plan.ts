import { KvError } from "@kv/interface";
import type { EngineTransferPlan, RegionIndexing } from "./engine-plan-types.js";
import { expandIds } from "./id-kernel.js";
import { type PairedBlocks, pairBlocks } from "./pair-blocks.js";
import { receivePassOf } from "./receive-pass-of.js";
import { outOfRange, requireCount, requireGroups, requireIds } from "./request-checks.js";
import type { ReceivePassGroup, RequestBlocks, RequestPlan, RequestRead } from "./request-plan-types.js";
import { countRuns, orderForRuns } from "./run-order.js";

/** Pairs of groups that live in the same regions, handled as one list. */
interface Batch {
  readonly regions: readonly number[];
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

  const byRegions = new Map<readonly number[], PairedBlocks[]>();
  const pass: ReceivePassGroup[] = [];
  for (const [group, localIds] of blocks.localBlockIds.entries()) {
    if (localIds.length === 0) continue;
    const computedBlocks = blocks.localComputedBlocks?.[group];
    if (computedBlocks !== undefined)
      requireCount(`localComputedBlocks of group ${group}`, computedBlocks, 0);
    const remoteIds = blocks.remoteBlockIds[group] ?? [];
    const regions = regionsOf(plan, group);
    requireIds(plan, group, localIds, remoteIds);
    const pairs = pairBlocks(plan, {
      group,
      localIds,
      remoteIds,
      numTokens: blocks.numTokens,
      computedBlocks,
    });
    const groupPass = receivePassOf(plan, group, localIds, pairs);
    if (groupPass !== undefined) pass.push(groupPass);
    byRegions.set(regions, [...(byRegions.get(regions) ?? []), pairs]);
  }
  const batches = [...byRegions].map(([regions, pairs]) => batchOf(plan, regions, pairs));
  const localIds = descriptorIds(batches, plan.localIndexing, plan.blockSizeRatio, "localParts");
  const remoteIds = descriptorIds(batches, plan.remoteIndexing, 1, "remoteBlocks");
  const lengthBytes = batches.reduce((sum, batch) => sum + batchBytes(plan, batch), 0);
  const reads: RequestRead[] = plan.sources.map((source, sourceIndex) => ({
    remoteRank: source.remoteRank,
    sourceIndex,
    localIds,
    remoteIds,
    lengthBytes: lengthBytes / plan.sources.length,
  }));
  const runs = batches.reduce((sum, { regions, localParts, remoteBlocks }) => {
    return sum + countRuns(localParts, remoteBlocks) * regions.length;
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

function batchOf(
  plan: EngineTransferPlan,
  regions: readonly number[],
  pairs: readonly PairedBlocks[],
): Batch {
  const localParts = joined(pairs.map((pair) => pair.localParts));
  const remoteBlocks = joined(pairs.map((pair) => pair.remoteBlocks));
  orderForRuns(localParts, remoteBlocks);
  for (let index = 1; index < localParts.length; index++) {
    if (localParts[index] !== localParts[index - 1]) continue;
    const block = Math.floor((localParts[index] as number) / plan.blockSizeRatio);
    throw outOfRange(`local kernel block ${block} is to be filled twice by one request`, { block });
  }
  return { regions, localParts, remoteBlocks };
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

/** Region by region; neighbouring regions whose blocks step alike are expanded in one go. */
function descriptorIds(
  batches: readonly Batch[],
  indexing: readonly RegionIndexing[],
  parts: number,
  which: "localParts" | "remoteBlocks",
): Int32Array {
  const out = new Int32Array(
    batches.reduce((sum, batch) => sum + batch[which].length * batch.regions.length, 0),
  );
  let cursor = 0;
  for (const batch of batches) {
    for (let first = 0; first < batch.regions.length; ) {
      const { blockStep, partStep } = at(indexing, batch.regions[first]);
      let end = first + 1;
      while (end < batch.regions.length) {
        const next = at(indexing, batch.regions[end]);
        if (next.blockStep !== blockStep || next.partStep !== partStep) break;
        end += 1;
      }
      const offsets = Int32Array.from(
        batch.regions.slice(first, end),
        (region) => at(indexing, region).offset,
      );
      cursor = expandIds(out, cursor, stepped(batch[which], parts, blockStep, partStep), offsets);
      first = end;
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

function batchBytes(plan: EngineTransferPlan, { regions, localParts }: Batch): number {
  const partBytes = regions.reduce(
    (sum, region) => sum + (plan.local.regions[region]?.blockLengthBytes ?? 0),
    0,
  );
  return (partBytes / plan.blockSizeRatio) * localParts.length;
}

function regionsOf(plan: EngineTransferPlan, group: number): readonly number[] {
  const regions = plan.regionsOfGroup[group] ?? [];
  if (regions.length > 0) {
    // Groups with equal regions share one key, and so one batch.
    return plan.regionsOfGroup.find((other) => sameList(other, regions)) ?? regions;
  }
  throw new KvError("KV_BLOCKS_MISMATCH", `group ${group} has blocks and no region to hold them`, {
    details: { group },
  });
}

function sameList(one: readonly number[], other: readonly number[]): boolean {
  return (
    one === other || (one.length === other.length && one.every((value, index) => value === other[index]))
  );
}

function at(indexing: readonly RegionIndexing[], region: number | undefined): RegionIndexing {
  const found = region === undefined ? undefined : indexing[region];
  if (found === undefined) throw new KvError("KV_INTERNAL", `region ${region} is not in the plan`);
  return found;
}
