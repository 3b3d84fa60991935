import type { EngineTransferPlan } from "../engine/engine-plan-types.js";
import type { ReceivePassGroup } from "../request/request-plan-types.js";
import { fail } from "./proof-result.js";

/** The effect of the receive pass on one block, seen from the finished block. */
export interface BlockPass {
  /** Its heads and tokens are put in order. */
  readonly permuted: boolean;
  /** Tokens of the block before this one are zeroed; 0: none. */
  readonly zeroUntilToken: number;
  /** Tokens of the block from here on are zeroed; Infinity: none. */
  readonly zeroFromToken: number;
}

export const UNTOUCHED: BlockPass = {
  permuted: false,
  zeroUntilToken: 0,
  zeroFromToken: Number.POSITIVE_INFINITY,
};

/**
 * Where a byte of a finished block was before the permutation, and how many bytes from there moved
 * together.
 */
export interface Origin {
  readonly offset: number;
  readonly runBytes: number;
}

/** The pass of one group by block id. Each block may be listed once for each action. */
export function passByBlock(pass: ReceivePassGroup | undefined): ReadonlyMap<number, BlockPass> {
  const found = new Map<number, BlockPass>();
  if (pass === undefined) return found;
  for (const block of pass.permuteBlockIds) {
    if (found.has(block))
      fail("receive-pass", `kernel block ${block} is permuted twice`, { block });
    found.set(block, { ...UNTOUCHED, permuted: true });
  }
  const zero = (block: number, untilToken: number, fromToken: number) => {
    const { permuted, zeroUntilToken, zeroFromToken } = found.get(block) ?? UNTOUCHED;
    found.set(block, {
      permuted,
      zeroUntilToken: Math.max(untilToken, zeroUntilToken),
      zeroFromToken: Math.min(fromToken, zeroFromToken),
    });
  };
  const { zeroBlockIds, leadingBlock, partialBlock } = pass;
  for (const block of zeroBlockIds) zero(block, 0, 0);
  if (leadingBlock !== undefined)
    zero(leadingBlock.blockId, leadingBlock.untilToken, UNTOUCHED.zeroFromToken);
  if (partialBlock !== undefined) zero(partialBlock.blockId, 0, partialBlock.fromToken);
  return found;
}

/**
 * The grid of heads and tokens on which the pass works within a block, by the plan's numbers for a
 * group and a region.
 */
export interface PassGrid {
  readonly heads: number;
  readonly tokens: number;
  readonly parts: number;
  readonly cellBytes: number;
  readonly tokenMajor: boolean;
  readonly blockBytes: number;
}

const TOKENS_OUTSIDE: ReadonlySet<string> = new Set(["LBNHC", "BLNHC"]);

/**
 * KV heads of the pass grid. Where the region has no heads of its own, a group that shares it may
 * have its own number.
 */
export function headsOfPass(plan: EngineTransferPlan, group: number, region: number): number {
  const { numKvHeads, replicated } = plan.local.regions[region] ?? {};
  const all = plan.headsOfRegion[region] ?? plan.localHeads;
  return numKvHeads === undefined && replicated !== true
    ? (plan.groupPlans[group]?.sharedHeads ?? all)
    : all;
}

export function passGrid(plan: EngineTransferPlan, group: number, region: number): PassGrid {
  const own = plan.groupPlans[group];
  const heads = headsOfPass(plan, group, region);
  const tokens = own === undefined ? plan.local.kernelBlockSize : own.partTokens * own.localParts;
  const blockBytes = plan.local.regions[region]?.blockLengthBytes ?? 0;
  const tokenMajor = heads === 1 || TOKENS_OUTSIDE.has(plan.local.layout);
  return {
    heads,
    tokens,
    parts: plan.blockSizeRatio,
    cellBytes: blockBytes / (heads * tokens),
    tokenMajor,
    blockBytes,
  };
}

function requireWhole(grid: PassGrid): void {
  if (Number.isInteger(grid.cellBytes)) return;
  const { heads, tokens, blockBytes } = grid;
  fail(
    "receive-pass",
    `the pass cannot see ${heads} heads of ${tokens} tokens in a block of ${blockBytes} bytes`,
    { heads, tokens, blockBytes },
  );
}

function gridPlace({ heads, tokens, cellBytes, tokenMajor }: PassGrid, offset: number) {
  const cell = Math.floor(offset / cellBytes);
  return {
    head: tokenMajor ? cell % heads : Math.floor(cell / tokens),
    token: tokenMajor ? Math.floor(cell / heads) : cell % tokens,
    cellByte: offset - cell * cellBytes,
  };
}

/** Whether the pass zeroes the byte, and how many bytes from there on it treats alike. */
export function zeroingAt(
  grid: PassGrid,
  offset: number,
  { zeroUntilToken, zeroFromToken }: BlockPass,
): { readonly zeroed: boolean; readonly runBytes: number } {
  const whole = zeroFromToken <= 0;
  if (whole || (zeroUntilToken <= 0 && zeroFromToken === Number.POSITIVE_INFINITY))
    return { zeroed: whole, runBytes: Number.POSITIVE_INFINITY };
  requireWhole(grid);
  const { token, cellByte } = gridPlace(grid, offset);
  const edge =
    [zeroUntilToken, zeroFromToken].find((one) => token < one && one < grid.tokens) ?? grid.tokens;
  const cells = grid.tokenMajor ? 1 : edge - token;
  return {
    zeroed: token < zeroUntilToken || token >= zeroFromToken,
    runBytes: cells * grid.cellBytes - cellByte,
  };
}

/**
 * The permutation as the contract has it (`[parts][heads][tokens of a part]` becomes
 * `[heads][tokens]`, or `[tokens][heads]` in a token-major cache), seen from the finished block.
 */
export function originOf(grid: PassGrid, offset: number): Origin {
  requireWhole(grid);
  const partTokens = grid.tokens / grid.parts;
  if (!Number.isInteger(partTokens)) {
    fail("receive-pass", `${grid.tokens} tokens of a block do not divide into ${grid.parts} parts`);
  }
  const { head, token, cellByte } = gridPlace(grid, offset);
  const part = Math.floor(token / partTokens);
  const inPart = token - part * partTokens;
  const landed = (part * grid.heads + head) * partTokens + inPart;
  const together = grid.tokenMajor ? 1 : partTokens - inPart;
  return {
    offset: landed * grid.cellBytes + cellByte,
    runBytes: together * grid.cellBytes - cellByte,
  };
}
