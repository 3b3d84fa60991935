import type { EngineTransferPlan } from "../engine/engine-plan.js";
import type { GroupPlan } from "../engine/group-plans.js";
import { invalidPlan } from "../errors.js";
import { orderOfLayout } from "../geometry/layout.js";
import type { RegionGeometry } from "../geometry/rank-geometry.js";
import type { ReceivePass, ReceivePassGroup } from "./build-receive-pass.js";

/**
 * Puts received blocks in order and zeroes uncovered tokens, in place. `regionBytes[i]` is a view
 * of local region `i` from its base address on, padding included. Call it once, after all reads of
 * the request have landed.
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
 * The bytes that `applyReceivePass` zeroes: rows `[offsetBytes, lengthBytes]` from the base of a
 * local region, by the region's index. For memory that this process cannot address.
 *
 * @throws As `applyReceivePass`; `KV_PLAN_INVALID` for a pass that orders blocks, which only
 * `applyReceivePass` does.
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

/** Bytes that become zero. */
export interface ZeroedBytes {
  readonly at: number;
  readonly lengthBytes: number;
}

/** Bytes from `from` on that move to `at`. */
export interface MovedBytes extends ZeroedBytes {
  readonly from: number;
}

/** All that a pass does to one region for one group. */
export interface PassEffect {
  /** Index of the region. */
  readonly index: number;
  readonly region: RegionGeometry;
  /** Blocks in which bytes move. */
  readonly permuted: Int32Array;
  /** The moves within each of these blocks, from the block's begin. */
  readonly copies: readonly MovedBytes[];
  /** From the region's begin; after the moves. */
  readonly zeroed: readonly ZeroedBytes[];
}

/** The effects of a pass, which `applyReceivePass` puts into memory and a proof on labels. */
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
  group: ReceivePassGroup,
  region: RegionGeometry,
  shapeOf: (lengthBytes: number) => BlockShape | undefined,
): Pick<PassEffect, "permuted" | "copies" | "zeroed"> {
  const { leadingBlock, partialBlock, zeroBlockIds, permuteBlockIds: permuted } = group;
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

/**
 * The inside of a block: `heads` × `tokens` cells of `cellBytes` (K and V of one head and token).
 */
interface BlockShape {
  readonly heads: number;
  readonly tokens: number;
  readonly cellBytes: number;
  readonly tokenMajor: boolean;
}

/**
 * From `[parts][heads][tokens of a part]` to `[heads][tokens]`, or to `[tokens][heads]` for a
 * token-major cache.
 */
function permutation(
  { heads, tokens, cellBytes, tokenMajor }: BlockShape,
  parts: number,
): MovedBytes[] {
  const partTokens = tokens / parts;
  const together = tokenMajor ? 1 : partTokens;
  const lengthBytes = together * cellBytes;
  const copies: MovedBytes[] = [];
  for (let part = 0; part < parts; part++) {
    for (let head = 0; head < heads; head++) {
      for (let token = part * partTokens; token < (part + 1) * partTokens; token += together) {
        const cell = tokenMajor ? token * heads + head : head * tokens + token;
        copies.push({ from: copies.length * lengthBytes, at: cell * cellBytes, lengthBytes });
      }
    }
  }
  return copies;
}

/** The bytes of some tokens in the block at an offset. */
function bytesOfTokens(
  offsetBytes: number,
  { heads, tokens, cellBytes, tokenMajor }: BlockShape,
  from: number,
  until: number,
): ZeroedBytes[] {
  const [rows, rowCells] = tokenMajor ? [1, heads] : [heads, 1];
  return Array.from({ length: rows }, (_, head) => ({
    at: offsetBytes + (head * tokens + from * rowCells) * cellBytes,
    lengthBytes: (until - from) * rowCells * cellBytes,
  }));
}

/**
 * The shape of a block; undefined for blocks whose cells hold several tokens each (compressed
 * latents): the engine masks those.
 */
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
  return {
    heads,
    tokens,
    cellBytes,
    tokenMajor: orderOfLayout(plan.local.layout) === "token-major",
  };
}

function requireLength(region: RegionGeometry, bytes: Uint8Array): void {
  const needed = (region.numBlocks - 1) * region.blockStrideBytes + region.blockLengthBytes;
  if (bytes.byteLength >= needed) return;
  throw invalidPlan(
    `region "${region.name}": a view of ${bytes.byteLength} bytes is too short: ${region.numBlocks} blocks need ${needed}`,
    { region: region.name, given: bytes.byteLength, needed },
  );
}
