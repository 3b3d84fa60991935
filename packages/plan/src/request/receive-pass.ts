import type { EngineTransferPlan } from "../engine/engine-plan.js";
import type { GroupPlan } from "../engine/group-plans.js";
import { invalidPlan } from "../errors.js";
import type { RegionGeometry } from "../geometry/rank-geometry.js";
import type { PairedBlocks } from "./pair-blocks.js";

/**
 * What `applyReceivePass` changes when all reads of a request have landed, before the engine uses
 * the blocks.
 */
export interface ReceivePass {
  readonly groups: readonly ReceivePassGroup[];
}

/** Local kernel blocks of one group that the receive pass changes. */
export interface ReceivePassGroup {
  readonly group: number;
  /** Blocks whose heads and tokens are put in order. */
  readonly permuteBlockIds: Int32Array;
  /** The block where the remote's window begins: tokens before `untilToken` are zeroed. */
  readonly leadingBlock?: { readonly blockId: number; readonly untilToken: number } | undefined;
  /** The block that is covered in part: tokens from `fromToken` on are zeroed. */
  readonly partialBlock?: { readonly blockId: number; readonly fromToken: number } | undefined;
  /** Blocks that no transfer covers; zeroed whole. */
  readonly zeroBlockIds: Int32Array;
}

export function buildReceivePass(
  plan: EngineTransferPlan,
  group: number,
  localIds: readonly number[],
  { localStart, count, validTokens }: PairedBlocks,
): ReceivePassGroup | undefined {
  // A state or scratch block has no tokens to order or zero.
  if (validTokens === undefined) return undefined;
  const { localPerLogical, localParts, partTokens } = plan.groupPlans[group] as GroupPlan;
  const kernelTokens = partTokens * localParts;
  const kernelBlock = (index: number) =>
    (localIds[Math.floor(index / localPerLogical)] as number) * localPerLogical +
    (index % localPerLogical);
  const kernelBlocks = (from: number, to: number) =>
    Array.from({ length: Math.max(0, to - from) }, (_, index) => kernelBlock(from + index));
  const first = Math.floor(localStart / localParts);
  const end = Math.ceil((localStart + count) / localParts);
  const permuted = plan.form === "permute" ? kernelBlocks(first, end) : [];
  let zeroed: number[] = [];
  let edges: Pick<ReceivePassGroup, "leadingBlock" | "partialBlock"> = {};
  if (plan.uncovered === "zeroed") {
    const untilToken = (localStart % localParts) * partTokens;
    if (untilToken > 0) edges = { leadingBlock: { blockId: kernelBlock(first), untilToken } };
    const fromToken = validTokens % kernelTokens;
    if (fromToken > 0) {
      const blockId = kernelBlock(Math.floor(validTokens / kernelTokens));
      edges = { ...edges, partialBlock: { blockId, fromToken } };
    }
    const behind = kernelBlocks(
      Math.ceil(validTokens / kernelTokens),
      localIds.length * localPerLogical,
    );
    zeroed = [...kernelBlocks(0, first), ...behind];
  }
  if (permuted.length + zeroed.length + Object.keys(edges).length === 0) return undefined;
  return {
    group,
    permuteBlockIds: Int32Array.from(permuted),
    zeroBlockIds: Int32Array.from(zeroed),
    ...edges,
  };
}

/**
 * Puts received blocks in order and zeroes uncovered tokens, in place. `regionBytes[i]` views local
 * region `i` from its base address, padding included. Call it once, when all reads have landed.
 *
 * @throws `KV_PLAN_INVALID` when a view is too short, a block does not divide into its heads and
 * tokens, or the pass belongs to another plan.
 */
export function applyReceivePass(
  plan: EngineTransferPlan,
  pass: ReceivePass,
  regionBytes: readonly Uint8Array[],
): void {
  for (const { index, region, permuted, copies, zeroed } of effectsOf(plan, pass)) {
    const bytes = regionBytes[index];
    if (bytes === undefined)
      throw invalidPlan(`region ${index} of the plan: no view of its bytes is given`);
    requireLength(region, bytes);

    const landed = new Uint8Array(permuted.length > 0 ? region.blockLengthBytes : 0);
    for (const id of permuted) {
      const start = id * region.blockStrideBytes;
      landed.set(bytes.subarray(start, start + landed.length));
      for (const { from, at, lengthBytes } of copies)
        bytes.set(landed.subarray(from, from + lengthBytes), start + at);
    }

    for (const { at, lengthBytes } of zeroed) bytes.fill(0, at, at + lengthBytes);
  }
}

/**
 * Returns what `applyReceivePass` zeroes, by region, as rows `[offsetBytes, lengthBytes]`: for
 * memory that this process cannot address.
 *
 * @throws As `applyReceivePass`; `KV_PLAN_INVALID` for a pass that orders blocks.
 */
export function uncoveredRuns(
  plan: EngineTransferPlan,
  pass: ReceivePass,
): ReadonlyMap<number, Float64Array> {
  if (pass.groups.some(({ permuteBlockIds }) => permuteBlockIds.length > 0))
    throw invalidPlan("the receive pass puts blocks in order: plan with `canPass: false`");
  const rows = new Map<number, number[]>();
  for (const { index, zeroed } of effectsOf(plan, pass)) {
    const ofRegion = zeroed.flatMap(({ at, lengthBytes }) => [at, lengthBytes]);
    rows.set(index, [...(rows.get(index) ?? []), ...ofRegion]);
  }
  return new Map([...rows].map(([index, ofRegion]) => [index, Float64Array.from(ofRegion)]));
}

export interface ZeroedBytes {
  readonly at: number;
  readonly lengthBytes: number;
}

export interface MovedBytes extends ZeroedBytes {
  readonly from: number;
}

export interface PassEffect {
  readonly index: number;
  readonly region: RegionGeometry;
  readonly permuted: Int32Array;
  readonly copies: readonly MovedBytes[];
  /** Offsets are from the region's start. Zeroing follows the moves. */
  readonly zeroed: readonly ZeroedBytes[];
}

/** `applyReceivePass` applies these effects to memory, a proof to labels. */
export function* effectsOf(plan: EngineTransferPlan, pass: ReceivePass): Generator<PassEffect> {
  for (const group of pass.groups) {
    const regions = plan.regionsOfGroup[group.group];
    const groupPlan = plan.groupPlans[group.group];
    if (regions === undefined || groupPlan === undefined)
      throw invalidPlan(`group ${group.group} of the receive pass is not in the plan`);
    for (const index of regions) {
      const region = plan.local.regions[index];
      if (region === undefined) throw invalidPlan(`region ${index} of the plan is missing`);
      const shapeOf = (lengthBytes: number) => blockShape(plan, groupPlan, index, lengthBytes);
      yield { index, region, ...effectOn(plan, group, region, shapeOf) };
    }
  }
}

function effectOn(
  plan: EngineTransferPlan,
  { leadingBlock, partialBlock, zeroBlockIds, permuteBlockIds: permuted }: ReceivePassGroup,
  region: RegionGeometry,
  shapeOf: (lengthBytes: number) => BlockShape | undefined,
): Pick<PassEffect, "permuted" | "copies" | "zeroed"> {
  const { packedMembers } = plan.local;
  const whole = permuted.length === 0 ? undefined : shapeOf(region.blockLengthBytes);
  const copies = whole === undefined ? [] : permutation(whole, plan.blockSizeRatio);

  // Each page of a row is a block of one layer.
  const pages =
    packedMembers !== undefined && region.name in packedMembers
      ? Object.values(packedMembers)
      : [{ offsetBytes: 0, lengthBytes: region.blockLengthBytes }];
  const zeroed = pages.flatMap(({ offsetBytes, lengthBytes }): ZeroedBytes[] => {
    const start = (id: number) => id * region.blockStrideBytes + offsetBytes;
    const shape = shapeOf(lengthBytes);
    const inBlock = (id: number, from: number, until: number) =>
      shape === undefined ? [] : bytesOfTokens(start(id), shape, from, until);
    return [
      ...(leadingBlock ? inBlock(leadingBlock.blockId, 0, leadingBlock.untilToken) : []),
      ...(partialBlock
        ? inBlock(partialBlock.blockId, partialBlock.fromToken, shape?.tokens ?? 0)
        : []),
      ...Array.from(zeroBlockIds, (id) => ({ at: start(id), lengthBytes })),
    ];
  });
  return { permuted, copies, zeroed };
}

/** A block of `heads` × `tokens` cells (K and V of one head and token). */
interface BlockShape {
  readonly heads: number;
  readonly tokens: number;
  readonly cellBytes: number;
  readonly isTokenMajor: boolean;
}

/**
 * From `[parts][heads][tokens of a part]` to `[heads][tokens]`, or to `[tokens][heads]` for a
 * token-major cache.
 */
function permutation(
  { heads, tokens, cellBytes, isTokenMajor }: BlockShape,
  parts: number,
): MovedBytes[] {
  const partTokens = tokens / parts;
  const together = isTokenMajor ? 1 : partTokens;
  const lengthBytes = together * cellBytes;
  const copies: MovedBytes[] = [];
  for (let part = 0; part < parts; part++) {
    for (let head = 0; head < heads; head++) {
      for (let token = part * partTokens; token < (part + 1) * partTokens; token += together) {
        const cell = isTokenMajor ? token * heads + head : head * tokens + token;
        copies.push({ from: copies.length * lengthBytes, at: cell * cellBytes, lengthBytes });
      }
    }
  }
  return copies;
}

function bytesOfTokens(
  offsetBytes: number,
  { heads, tokens, cellBytes, isTokenMajor }: BlockShape,
  from: number,
  until: number,
): ZeroedBytes[] {
  const [rows, rowCells] = isTokenMajor ? [1, heads] : [heads, 1];
  return Array.from({ length: rows }, (_, head) => ({
    at: offsetBytes + (head * tokens + from * rowCells) * cellBytes,
    lengthBytes: (until - from) * rowCells * cellBytes,
  }));
}

/** Undefined for compressed latents, whose cells hold several tokens: the engine masks them. */
function blockShape(
  plan: EngineTransferPlan,
  { partTokens, localParts, sharedHeads }: GroupPlan,
  index: number,
  lengthBytes: number,
): BlockShape | undefined {
  const { name, numKvHeads, replicated } = plan.local.regions[index] ?? {};
  const isOwn = numKvHeads !== undefined || replicated === true;
  const heads = (isOwn ? undefined : sharedHeads) ?? plan.headsOfRegion[index] ?? plan.localHeads;
  const tokens = partTokens * localParts;
  const cellBytes = lengthBytes / (heads * tokens);
  if (heads === 1 && plan.blockSizeRatio === 1 && !Number.isInteger(cellBytes)) return undefined;
  if (!Number.isInteger(cellBytes)) {
    throw invalidPlan(
      `region "${name}": a block of ${lengthBytes} bytes does not divide into ${heads} heads of ${tokens} tokens`,
    );
  }
  // N, the tokens of a block, comes before H, its heads.
  return { heads, tokens, cellBytes, isTokenMajor: plan.local.layout.includes("NH") };
}

function requireLength(region: RegionGeometry, bytes: Uint8Array): void {
  const needed = (region.numBlocks - 1) * region.blockStrideBytes + region.blockLengthBytes;
  if (bytes.byteLength >= needed) return;
  throw invalidPlan(
    `region "${region.name}": a view of ${bytes.byteLength} bytes is too short: ${region.numBlocks} blocks need ${needed}`,
    { region: region.name, given: bytes.byteLength, needed },
  );
}
