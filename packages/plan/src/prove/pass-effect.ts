import type { EngineTransferPlan } from "../engine-plan-types.js";
import type { ReceivePassGroup } from "../request-plan-types.js";
import { fail } from "./verdict.js";

/** What the receive pass does with one block, told backwards: whence each byte comes. */
export interface BlockPass {
  readonly permuted: boolean;
  /** Tokens of the block from here on are zeroed; Infinity: none. */
  readonly zeroFromToken: number;
}

/** Where a byte of a finished block was before the permutation, and how many bytes from there moved together. */
export interface Origin {
  readonly offset: number;
  readonly runBytes: number;
}

/** The pass of one group by block id. Each block may be named once for each thing that is done. */
export function passByBlock(pass: ReceivePassGroup | undefined): ReadonlyMap<number, BlockPass> {
  const found = new Map<number, BlockPass>();
  if (pass === undefined) return found;
  for (const block of pass.permuteBlockIds) {
    if (found.has(block)) fail("receive-pass", `kernel block ${block} is permuted twice`, { block });
    found.set(block, { permuted: true, zeroFromToken: Number.POSITIVE_INFINITY });
  }
  const zero = (block: number, fromToken: number) => {
    const before = found.get(block);
    found.set(block, {
      permuted: before?.permuted ?? false,
      zeroFromToken: Math.min(fromToken, before?.zeroFromToken ?? Number.POSITIVE_INFINITY),
    });
  };
  for (const block of pass.zeroBlockIds) zero(block, 0);
  if (pass.partialBlock !== undefined) zero(pass.partialBlock.blockId, pass.partialBlock.fromToken);
  return found;
}

/** The grid on which the pass works within a block, as the plan has it for a group and a region. */
export interface PassGrid {
  readonly heads: number;
  readonly tokens: number;
  readonly parts: number;
  readonly cellBytes: number;
  readonly tokenMajor: boolean;
  readonly blockBytes: number;
}

const TOKENS_OUTSIDE: ReadonlySet<string> = new Set(["LBNHC", "BLNHC"]);

export function passGrid(plan: EngineTransferPlan, group: number, region: number): PassGrid {
  const own = plan.groupPlans[group];
  const heads = plan.headsOfRegion[region] ?? plan.localHeads;
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
    {
      heads,
      tokens,
      blockBytes,
    },
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
  fromToken: number,
): { readonly zeroed: boolean; readonly runBytes: number } {
  if (fromToken <= 0 || fromToken === Number.POSITIVE_INFINITY)
    return { zeroed: fromToken <= 0, runBytes: Number.POSITIVE_INFINITY };
  requireWhole(grid);
  const { token, cellByte } = gridPlace(grid, offset);
  const zeroed = token >= fromToken;
  const cells = grid.tokenMajor ? 1 : zeroed ? grid.tokens - token : fromToken - token;
  return { zeroed, runBytes: cells * grid.cellBytes - cellByte };
}

/**
 * The permutation as the contract has it (`[parts][heads][tokens of a part]` becomes `[heads][tokens]`, or `[tokens][heads]` in a
 * token-major cache), told from the finished block's side.
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
  return { offset: landed * grid.cellBytes + cellByte, runBytes: together * grid.cellBytes - cellByte };
}
