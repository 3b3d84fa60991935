import { KvError } from "@kv/interface";
import type { EngineTransferPlan } from "../engine/engine-plan.js";
import type { GroupPlan } from "../engine/group-plans.js";
import { mismatch } from "./request-checks.js";

/**
 * The pairing of one group of a request: the stretch of local parts that is filled, and its place
 * in the remote list.
 */
export interface PairedBlocks {
  readonly localStart: number;
  /** The remote part that the first local part is filled from. */
  readonly remoteStart: number;
  readonly count: number;
  /**
   * Tokens of the local blocks that hold KV after the transfer, from the begin of the first local
   * block; undefined for blocks without tokens.
   */
  readonly validTokens: number | undefined;
}

/** The blocks of one group of a request. */
export interface GroupBlocks {
  readonly group: number;
  readonly localIds: readonly number[];
  readonly remoteIds: readonly number[];
  readonly numTokens: number | undefined;
  readonly computedBlocks: number | undefined;
  /**
   * Blocks that the remote's list had behind its last token, and that `remoteIds` lack. Default 0.
   */
  readonly lookAhead?: number | undefined;
}

/**
 * Pairs the local blocks of a group with the remote blocks of the same tokens. The number of
 * locally computed blocks gives the position, where it is known. Otherwise both lists are taken to
 * end at the same token, as vLLM does.
 *
 * @throws `KV_BLOCKS_MISMATCH` where the position is ambiguous, or the remote blocks do not reach
 * far enough.
 */
export function pairBlocks(plan: EngineTransferPlan, blocks: GroupBlocks): PairedBlocks {
  const groupPlan = plan.groupPlans[blocks.group];
  if (groupPlan === undefined)
    throw new KvError("KV_INTERNAL", `group ${blocks.group} is not in the plan`);
  if (groupPlan.extent === "state" || groupPlan.extent === "whole")
    return pairLast(groupPlan, blocks);
  return pairTokens(groupPlan, blocks);
}

/** Descriptors of a logical block on each side. */
export function partsPerLogical(groupPlan: GroupPlan): { local: number; remote: number } {
  return {
    local: groupPlan.localPerLogical * groupPlan.localParts,
    remote: groupPlan.remotePerLogical * groupPlan.remoteParts,
  };
}

function pairTokens(groupPlan: GroupPlan, blocks: GroupBlocks): PairedBlocks {
  const { localIds, remoteIds, group, numTokens } = blocks;
  const per = partsPerLogical(groupPlan);
  const { partTokens } = groupPlan;
  const parts = localIds.length * per.local;
  const held = remoteIds.length * per.remote;
  const windowed = groupPlan.extent === "window";
  const ends = numTokens === undefined ? undefined : Math.ceil(numTokens / partTokens);
  if (!windowed && (ends ?? 0) > held) {
    throw mismatch(
      `group ${group}: the remote's ${remoteIds.length} blocks hold ${held * partTokens} tokens at most, fewer than the ${numTokens} it announced`,
      { group, remoteBlocks: remoteIds.length, numTokens },
    );
  }
  const computed = windowed ? undefined : blocks.computedBlocks;
  // A windowed list begins somewhere in the sequence; its end gives the position.
  const unseen =
    windowed && numTokens !== undefined
      ? Math.ceil(numTokens / groupPlan.remoteBlockTokens) * per.remote - held
      : 0;
  let start =
    computed === undefined ? alignedAtEnd(groupPlan, blocks, unseen) : computed * per.local;
  let localStart = 0;
  if (windowed && start < 0) {
    // The remote list begins later than the local one. Attention does not use tokens before the
    // window.
    localStart = -start;
    start = 0;
    requireWindow(groupPlan, blocks, unseen * partTokens);
  }
  const usable = ends === undefined ? held : Math.min(held, ends - unseen);
  // Parts before the remote's window are not in `usable` either.
  const count = Math.min(parts, usable - start);
  if (parts - localStart - count >= per.local || count <= 0) {
    throw mismatch(
      `group ${group}: ${localIds.length} local blocks of ${groupPlan.localBlockTokens} tokens are to be filled after ` +
        `${computed ?? "an unknown number of"} computed ones, and the remote's ${remoteIds.length} blocks of ` +
        `${groupPlan.remoteBlockTokens} tokens do not reach that far`,
      {
        group,
        localBlocks: localIds.length,
        remoteBlocks: remoteIds.length,
        computedBlocks: computed ?? null,
      },
    );
  }
  const coveredTokens = count * partTokens;
  const validTokens =
    localStart * partTokens +
    (numTokens === undefined
      ? coveredTokens
      : Math.min(coveredTokens, numTokens - (unseen + start) * partTokens));
  return { localStart, remoteStart: start, count, validTokens };
}

/**
 * The remote cuts a window's list to one length, so blocks of look-ahead behind the last token take
 * the place of as many at its begin. The local list has a block more than the window before the
 * next token; a list of the whole sequence, or one after a prefix hit, does not say where that
 * window begins.
 *
 * @throws `KV_BLOCKS_MISMATCH` where the remote's list may begin within the window.
 */
function requireWindow(
  { localBlockTokens }: GroupPlan,
  { group, localIds, numTokens = 0, computedBlocks = 0, lookAhead = 0 }: GroupBlocks,
  begin: number,
): void {
  if (lookAhead === 0) return;
  const isCut = computedBlocks === 0 && localIds.length < Math.ceil(numTokens / localBlockTokens);
  const needed = isCut ? numTokens + 1 - (localIds.length - 1) * localBlockTokens : 0;
  if (begin <= needed) return;
  throw mismatch(
    `group ${group}: the remote's list of this window has ${lookAhead} blocks behind the last of ${numTokens} tokens, and lacks as many at its begin: ` +
      `it holds tokens from ${begin} on, and the window may begin at ${needed}`,
    { group, lookAhead, numTokens, begin, needed },
  );
}

/** The begin of the local blocks within the remote list, when both lists end at the same token. */
function alignedAtEnd(groupPlan: GroupPlan, blocks: GroupBlocks, unseen: number): number {
  const { group, localIds, remoteIds, numTokens } = blocks;
  const per = partsPerLogical(groupPlan);
  const parts = localIds.length * per.local;
  const held = remoteIds.length * per.remote;
  const windowed = groupPlan.extent === "window";
  let start: number | undefined;
  if (numTokens !== undefined) {
    // Local lists end on a boundary of their own blocks, which need not be one of the remote's.
    start = Math.ceil(numTokens / groupPlan.localBlockTokens) * per.local - parts - unseen;
  } else if (per.local === per.remote) {
    start = held - parts;
  } else if (parts >= held && !windowed) {
    start = 0;
  }
  if (start !== undefined && (windowed || start >= 0) && unseen >= 0) return start;
  throw mismatch(
    `group ${group}: with ${localIds.length} local and ${remoteIds.length} remote blocks the place of the local blocks ` +
      `in the remote list is ambiguous (tokens: ${numTokens ?? "unknown"})`,
    {
      group,
      localBlocks: localIds.length,
      remoteBlocks: remoteIds.length,
      numTokens: numTokens ?? null,
    },
  );
}

/**
 * Pairs blocks without tokens from the ends of both lists: the remote's earlier states are older. A
 * state may have one more local block than remote ones, for a position that the local engine
 * computes itself. Logical blocks are moved whole, with all of their kernel blocks. (vLLM 0.33,
 * `_apply_prefix_caching`.)
 */
function pairLast(groupPlan: GroupPlan, { group, localIds, remoteIds }: GroupBlocks): PairedBlocks {
  const isState = groupPlan.extent === "state";
  const spare = isState ? 1 : 0;
  const excess = localIds.length - remoteIds.length;
  const count = Math.min(localIds.length, remoteIds.length);
  if (excess > spare || count === 0) {
    throw mismatch(
      `group ${group}: ${localIds.length} local blocks of ${isState ? "state" : "scratch"} cannot be filled from ` +
        `${remoteIds.length} remote ones`,
      { group, localBlocks: localIds.length, remoteBlocks: remoteIds.length },
    );
  }
  const per = partsPerLogical(groupPlan);
  return {
    localStart: 0,
    remoteStart: (remoteIds.length - count) * per.remote,
    count: count * per.local,
    validTokens: undefined,
  };
}
