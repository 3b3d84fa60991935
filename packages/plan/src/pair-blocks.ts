import { KvError } from "@kv/interface";
import type { EngineTransferPlan } from "./engine-plan-types.js";

/** One group of a request: parts of local blocks, and the remote kernel block that each is filled from, in token order. */
export interface PairedBlocks {
  /** `kernelBlock * blockSizeRatio + part`. */
  readonly localParts: Int32Array;
  readonly remoteBlocks: Int32Array;
  /** Tokens of the local blocks that hold KV after the transfer, counted from the first local block's begin. */
  readonly validTokens: number;
}

export interface GroupBlocks {
  readonly group: number;
  readonly localIds: readonly number[];
  readonly remoteIds: readonly number[];
  readonly numTokens: number | undefined;
  /** Logical local blocks before the first of `localIds`. */
  readonly computedBlocks: number | undefined;
}

/**
 * Finds, for each part of the local blocks, the remote block of the same tokens. Where the number of locally computed blocks is known the
 * position follows from it; else both lists are taken to end at the same token, as vLLM does, and refused when that cannot be told.
 */
export function pairBlocks(plan: EngineTransferPlan, blocks: GroupBlocks): PairedBlocks {
  const { blockSizeRatio, local, remote } = plan;
  const { localIds, remoteIds, group, numTokens } = blocks;
  const partsPerLogical = local.physicalBlocksPerLogical * blockSizeRatio;
  const parts = localIds.length * partsPerLogical;
  const held = remoteIds.length * remote.physicalBlocksPerLogical;
  const windowed = plan.groups[group] === "swa";
  const partTokens = remote.kernelBlockSize;
  const ends = numTokens === undefined ? undefined : Math.ceil(numTokens / partTokens);
  if (!windowed && ends !== undefined && ends > held) {
    throw mismatch(
      `group ${group}: the remote's ${remoteIds.length} blocks hold ${held * partTokens} tokens at most, fewer than the ${numTokens} it announced`,
      { group, remoteBlocks: remoteIds.length, numTokens },
    );
  }
  const computed = windowed ? undefined : blocks.computedBlocks;
  // A windowed list begins somewhere in the sequence; where, its end tells.
  const unseen = windowed && numTokens !== undefined ? paddedBlocks(plan, numTokens) - held : 0;
  const start =
    computed === undefined ? alignedAtEnd(plan, blocks, parts, held, unseen) : computed * partsPerLogical;
  const usable = ends === undefined ? held : Math.min(held, ends - unseen);
  const count = Math.min(parts, usable - start);
  if (parts - count >= partsPerLogical || count <= 0) {
    throw mismatch(
      `group ${group}: ${localIds.length} local blocks of ${local.kernelBlockSize * local.physicalBlocksPerLogical} tokens ` +
        `are to be filled after ${computed ?? "an unknown number of"} computed ones, and the remote's ${remoteIds.length} blocks of ` +
        `${partTokens * remote.physicalBlocksPerLogical} tokens do not reach that far`,
      {
        group,
        localBlocks: localIds.length,
        remoteBlocks: remoteIds.length,
        computedBlocks: computed ?? null,
      },
    );
  }
  const localParts = new Int32Array(count);
  const remoteBlocks = new Int32Array(count);
  expand(localParts, localIds, partsPerLogical, 0);
  expand(remoteBlocks, remoteIds, remote.physicalBlocksPerLogical, start);
  const coveredTokens = count * partTokens;
  const validTokens =
    numTokens === undefined
      ? coveredTokens
      : Math.min(coveredTokens, numTokens - (unseen + start) * partTokens);
  return { localParts, remoteBlocks, validTokens };
}

/** Where local blocks begin within the remote's list, when both are taken to end together. */
function alignedAtEnd(
  plan: EngineTransferPlan,
  blocks: GroupBlocks,
  parts: number,
  held: number,
  unseen: number,
): number {
  const { group, localIds, remoteIds, numTokens } = blocks;
  const { local, remote, blockSizeRatio } = plan;
  let start: number | undefined;
  if (numTokens !== undefined) {
    // Local lists end on a boundary of their own blocks, which need not be one of the remote's.
    const logicalTokens = local.physicalBlocksPerLogical * local.kernelBlockSize;
    start =
      Math.ceil(numTokens / logicalTokens) * local.physicalBlocksPerLogical * blockSizeRatio - parts - unseen;
  } else if (local.physicalBlocksPerLogical * blockSizeRatio === remote.physicalBlocksPerLogical) {
    start = held - parts;
  } else if (parts >= held) {
    start = 0;
  }
  if (start !== undefined && start >= 0 && unseen >= 0) return start;
  throw mismatch(
    `group ${group}: with ${localIds.length} local and ${remoteIds.length} remote blocks it cannot be told where in the ` +
      `remote's list the local ones begin (tokens: ${numTokens ?? "not said"})`,
    { group, localBlocks: localIds.length, remoteBlocks: remoteIds.length, numTokens: numTokens ?? null },
  );
}

/** Kernel blocks that the remote holds for so many tokens, allocation padding included. */
function paddedBlocks({ remote }: EngineTransferPlan, numTokens: number): number {
  const { physicalBlocksPerLogical, kernelBlockSize } = remote;
  return Math.ceil(numTokens / (kernelBlockSize * physicalBlocksPerLogical)) * physicalBlocksPerLogical;
}

/** Fills `out` with the parts of each block, from part number `skip` of the whole list on. */
function expand(out: Int32Array, ids: readonly number[], factor: number, skip: number): void {
  let cursor = 0;
  let part = skip % factor;
  for (let index = Math.floor(skip / factor); cursor < out.length; index++) {
    const first = (ids[index] ?? 0) * factor;
    for (; part < factor && cursor < out.length; part++) out[cursor++] = first + part;
    part = 0;
  }
}

function mismatch(message: string, details: Record<string, unknown>): KvError {
  return new KvError("KV_BLOCKS_MISMATCH", message, {
    hint: "say how many blocks a prefix hit supplies (localComputedBlocks) and how many tokens the remote holds (numTokens)",
    details,
  });
}
