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

/** The grid on which the pass works within a block, as the plan has it. */
function gridOf(plan: EngineTransferPlan, blockBytes: number) {
  const heads = plan.localHeads;
  const tokens = plan.local.kernelBlockSize;
  const cellBytes = blockBytes / (heads * tokens);
  if (!Number.isInteger(cellBytes)) {
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
  const tokenMajor = plan.blockOrder === "token-major";
  return { heads, tokens, cellBytes, tokenMajor };
}

function gridPlace({ heads, tokens, cellBytes, tokenMajor }: ReturnType<typeof gridOf>, offset: number) {
  const cell = Math.floor(offset / cellBytes);
  return {
    head: tokenMajor ? cell % heads : Math.floor(cell / tokens),
    token: tokenMajor ? Math.floor(cell / heads) : cell % tokens,
    cellByte: offset - cell * cellBytes,
  };
}

/** Whether the pass zeroes the byte, and how many bytes from there on it treats alike. */
export function zeroingAt(
  plan: EngineTransferPlan,
  blockBytes: number,
  offset: number,
  fromToken: number,
): { readonly zeroed: boolean; readonly runBytes: number } {
  if (fromToken <= 0 || fromToken === Number.POSITIVE_INFINITY)
    return { zeroed: fromToken <= 0, runBytes: blockBytes - offset };
  const grid = gridOf(plan, blockBytes);
  const { token, cellByte } = gridPlace(grid, offset);
  const zeroed = token >= fromToken;
  const cells = grid.tokenMajor ? 1 : zeroed ? grid.tokens - token : fromToken - token;
  return { zeroed, runBytes: cells * grid.cellBytes - cellByte };
}

/**
 * The permutation as the contract has it (`[parts][heads][tokens of a part]` becomes `[heads][tokens]`, or `[tokens][heads]` in a
 * token-major cache), told from the finished block's side.
 */
export function originOf(plan: EngineTransferPlan, blockBytes: number, offset: number): Origin {
  const grid = gridOf(plan, blockBytes);
  const partTokens = grid.tokens / plan.blockSizeRatio;
  if (!Number.isInteger(partTokens)) {
    fail("receive-pass", `${grid.tokens} tokens of a block do not divide into ${plan.blockSizeRatio} parts`);
  }
  const { head, token, cellByte } = gridPlace(grid, offset);
  const part = Math.floor(token / partTokens);
  const inPart = token - part * partTokens;
  const landed = (part * grid.heads + head) * partTokens + inPart;
  const together = grid.tokenMajor ? 1 : partTokens - inPart;
  return { offset: landed * grid.cellBytes + cellByte, runBytes: together * grid.cellBytes - cellByte };
}
