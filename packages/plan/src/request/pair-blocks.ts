import type { EngineTransferPlan } from "../engine/engine-plan.js";
import type { GroupPlan } from "../engine/group-plans.js";
import { mismatch, type RequestBlocks } from "./request-blocks.js";

export interface PairedBlocks {
  readonly localStart: number;
  /** The remote part that fills the first local part. */
  readonly remoteStart: number;
  readonly count: number;
  /**
   * Tokens with KV after the transfer, from the start of the first local block; undefined for
   * blocks without tokens.
   */
  readonly validTokens: number | undefined;
}

export interface GroupBlocks {
  readonly group: number;
  readonly localIds: readonly number[];
  readonly remoteIds: readonly number[];
  readonly numTokens: number | undefined;
  readonly computedBlocks: number | undefined;
  /** Blocks behind the remote's last token that `remoteIds` lack. Default 0. */
  readonly lookAhead?: number | undefined;
}

export function partsPerLogical(groupPlan: GroupPlan): { localPer: number; remotePer: number } {
  return {
    localPer: groupPlan.localPerLogical * groupPlan.localParts,
    remotePer: groupPlan.remotePerLogical * groupPlan.remoteParts,
  };
}

/**
 * Pairs local and remote blocks of the same tokens. Without the number of locally computed blocks,
 * both lists are taken to end at the same token, as in vLLM.
 *
 * @throws `KV_BLOCKS_MISMATCH` where the position is ambiguous, or the remote blocks do not reach
 * far enough.
 */
export function pairBlocks(groupPlan: GroupPlan, blocks: GroupBlocks): PairedBlocks {
  const { extent, partTokens, localBlockTokens, remoteBlockTokens } = groupPlan;
  if (extent === "state" || extent === "whole") return pairLast(groupPlan, blocks);
  const { localIds, remoteIds, group, numTokens } = blocks;
  const { localPer, remotePer } = partsPerLogical(groupPlan);
  const parts = localIds.length * localPer;
  const held = remoteIds.length * remotePer;
  const isWindow = extent === "window";
  const ends = numTokens === undefined ? undefined : Math.ceil(numTokens / partTokens);
  if (!isWindow && (ends ?? 0) > held) {
    throw mismatch(
      `group ${group}: the remote's ${remoteIds.length} blocks hold ${held * partTokens} tokens at most, fewer than the ${numTokens} it announced`,
      { group, remoteBlocks: remoteIds.length, numTokens },
    );
  }
  const computed = isWindow ? undefined : blocks.computedBlocks;
  // A windowed list begins anywhere; its end gives the position.
  const unseen =
    isWindow && numTokens !== undefined
      ? Math.ceil(numTokens / remoteBlockTokens) * remotePer - held
      : 0;
  const aligned =
    computed === undefined ? alignedAtEnd(groupPlan, blocks, unseen) : computed * localPer;
  // A window's remote list may begin later than the local one, as attention ignores tokens before
  // the window.
  const localStart = isWindow ? Math.max(0, -aligned) : 0;
  const remoteStart = aligned + localStart;
  if (localStart > 0) requireWindow(groupPlan, blocks, unseen * partTokens);
  const usable = ends === undefined ? held : Math.min(held, ends - unseen);
  // Parts before the remote's window are not in `usable` either.
  const count = Math.min(parts, usable - remoteStart);
  if (parts - localStart - count >= localPer || count <= 0) {
    throw mismatch(
      `group ${group}: ${localIds.length} local blocks of ${localBlockTokens} tokens are to be filled after ` +
        `${computed ?? "an unknown number of"} computed ones, and the remote's ${remoteIds.length} blocks of ` +
        `${remoteBlockTokens} tokens do not reach that far`,
      {
        group,
        localBlocks: localIds.length,
        remoteBlocks: remoteIds.length,
        computedBlocks: computed ?? null,
      },
    );
  }
  const left =
    numTokens === undefined
      ? Number.POSITIVE_INFINITY
      : numTokens - (unseen + remoteStart) * partTokens;
  const validTokens = localStart * partTokens + Math.min(count * partTokens, left);
  return { localStart, remoteStart, count, validTokens };
}

/**
 * The remote cuts a window's list to one length, so each look-ahead block displaces one at its
 * start. The local list has a block more than the window before the next token; a list of the whole
 * sequence, or one after a prefix hit, hides where that window begins.
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

/** Assumes that both lists end at the same token. */
function alignedAtEnd(groupPlan: GroupPlan, blocks: GroupBlocks, unseen: number): number {
  const { group, localIds, remoteIds, numTokens } = blocks;
  const { localPer, remotePer } = partsPerLogical(groupPlan);
  const parts = localIds.length * localPer;
  const held = remoteIds.length * remotePer;
  const isWindow = groupPlan.extent === "window";
  let start: number | undefined;
  if (numTokens !== undefined) {
    // Local lists end on their own block boundary, which need not be one of the remote's.
    start = Math.ceil(numTokens / groupPlan.localBlockTokens) * localPer - parts - unseen;
  } else if (localPer === remotePer) {
    start = held - parts;
  } else if (parts >= held && !isWindow) {
    start = 0;
  }
  if (start !== undefined && (isWindow || start >= 0) && unseen >= 0) return start;
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
 * From the ends of both lists, as earlier remote states are older. A state may have one more local
 * block, which the local engine computes. Logical blocks move whole. (vLLM 0.33,
 * `_apply_prefix_caching`.)
 */
function pairLast(groupPlan: GroupPlan, { group, localIds, remoteIds }: GroupBlocks): PairedBlocks {
  const isState = groupPlan.extent === "state";
  const excess = localIds.length - remoteIds.length;
  const count = Math.min(localIds.length, remoteIds.length);
  if (excess > (isState ? 1 : 0) || count === 0) {
    throw mismatch(
      `group ${group}: ${localIds.length} local blocks of ${isState ? "state" : "scratch"} cannot be filled from ` +
        `${remoteIds.length} remote ones`,
      { group, localBlocks: localIds.length, remoteBlocks: remoteIds.length },
    );
  }
  const { localPer, remotePer } = partsPerLogical(groupPlan);
  return {
    localStart: 0,
    remoteStart: (remoteIds.length - count) * remotePer,
    count: count * localPer,
    validTokens: undefined,
  };
}

/**
 * By group: remote blocks behind the last token, such as vLLM's look-ahead for speculative
 * decoding. A list of a whole sequence shows them by its length; a window's list, cut to one
 * length, does not, so without such a group they are unknown.
 *
 * @throws `KV_BLOCKS_MISMATCH` where groups with blocks of other sizes leave it open.
 */
export function lookAheadBlocks(
  { groupPlans }: EngineTransferPlan,
  { remoteBlockIds, numTokens }: RequestBlocks,
): readonly number[] {
  if (numTokens === undefined || !groupPlans.some(({ extent }) => extent === "window")) return [];
  // The remote has blocks for more than `over` and at most `upTo` tokens.
  let [over, upTo] = [0, Number.POSITIVE_INFINITY];
  for (const [group, { extent, remoteBlockTokens }] of groupPlans.entries()) {
    const held = remoteBlockIds[group]?.length ?? 0;
    if (extent !== "sequence" || held <= Math.ceil(numTokens / remoteBlockTokens)) continue;
    over = Math.max(over, (held - 1) * remoteBlockTokens);
    upTo = Math.min(upTo, held * remoteBlockTokens);
  }
  if (over === 0) return [];
  return groupPlans.map(({ extent, remoteBlockTokens }, group) => {
    const held = remoteBlockIds[group]?.length ?? 0;
    if (extent !== "window" || held === 0) return 0;
    const least = Math.ceil((over + 1) / remoteBlockTokens);
    const most = Math.ceil(upTo / remoteBlockTokens);
    const extra = most - Math.ceil(numTokens / remoteBlockTokens);
    if (least === most && extra < held) return extra;
    throw mismatch(
      `group ${group}: the remote has blocks for more than the ${numTokens} tokens that it announced, and which of the ${held} blocks of this window ` +
        `lie behind them is open: it has blocks for ${over + 1} to ${upTo} tokens, and ${remoteBlockTokens} tokens in a block of this group`,
      { group, remoteBlocks: held, numTokens, over, upTo },
    );
  });
}
