import { KvError } from "@kv/interface";
import type { EngineTransferPlan } from "../engine/engine-plan-types.js";
import { orderOfLayout } from "../geometry/layout.js";
import type { RegionGeometry } from "../geometry/rank-geometry.js";
import type { ReceivePass, ReceivePassGroup } from "../request/request-plan-types.js";

/**
 * The inside of a block: `heads` × `tokens` cells of `cellBytes` (K and V of one head and token).
 */
interface BlockShape {
  readonly heads: number;
  readonly tokens: number;
  readonly cellBytes: number;
  readonly tokenMajor: boolean;
}

/** A region of the plan, as one group uses it. */
interface PassPlace {
  readonly plan: EngineTransferPlan;
  /** Index of the region. */
  readonly index: number;
  readonly region: RegionGeometry;
  /** Tokens of the group in a kernel block. */
  readonly tokens: number;
  /** `GroupPlan.sharedHeads`. */
  readonly sharedHeads: number | undefined;
}

/**
 * Puts received blocks in order and zeroes uncovered tokens, in place. `regionBytes[i]` is a view
 * of local region `i` from its base address on, padding included. Call it once, after all reads of
 * the request have landed. Errors: `KV_PLAN_INVALID` when a view is too short, a block does not
 * divide into its heads and tokens, or the pass belongs to another plan.
 */
export function applyReceivePass(
  plan: EngineTransferPlan,
  pass: ReceivePass,
  regionBytes: readonly Uint8Array[],
): void {
  for (const { place, group } of placesOf(plan, pass)) {
    const { index, region } = place;
    const bytes = regionBytes[index];
    if (bytes === undefined)
      throw new KvError(
        "KV_PLAN_INVALID",
        `region ${index} of the plan: no view of its bytes is given`,
      );
    requireLength(region, bytes);
    if (group.permuteBlockIds.length > 0) permuteBlocks(place, group.permuteBlockIds, bytes);
    forUncovered(place, group, (offset, length) => void bytes.fill(0, offset, offset + length));
  }
}

/**
 * The bytes that `applyReceivePass` zeroes: rows `[offsetBytes, lengthBytes]` from the base of a
 * local region, by the region's index. For memory that this process cannot address. Errors: as
 * `applyReceivePass`; `KV_PLAN_INVALID` for a pass that orders blocks, which only
 * `applyReceivePass` does.
 */
export function uncoveredRuns(
  plan: EngineTransferPlan,
  pass: ReceivePass,
): ReadonlyMap<number, Float64Array> {
  const rows = new Map<number, number[]>();
  for (const { place, group } of placesOf(plan, pass)) {
    if (group.permuteBlockIds.length > 0)
      throw new KvError(
        "KV_PLAN_INVALID",
        "the receive pass puts blocks in order: plan with `canPass: false`",
      );
    const ofRegion = rows.get(place.index) ?? [];
    forUncovered(place, group, (offset, length) => void ofRegion.push(offset, length));
    rows.set(place.index, ofRegion);
  }
  return new Map([...rows].map(([index, ofRegion]) => [index, Float64Array.from(ofRegion)]));
}

/** Each region of each group of a pass. */
function* placesOf(plan: EngineTransferPlan, pass: ReceivePass) {
  for (const group of pass.groups) {
    const regions = plan.regionsOfGroup[group.group];
    const groupPlan = plan.groupPlans[group.group];
    if (regions === undefined || groupPlan === undefined)
      throw new KvError(
        "KV_PLAN_INVALID",
        `group ${group.group} of the receive pass is not in the plan`,
      );
    const { sharedHeads } = groupPlan;
    const tokens = groupPlan.partTokens * groupPlan.localParts;
    for (const index of regions) {
      const region = plan.local.regions[index];
      if (region === undefined)
        throw new KvError("KV_PLAN_INVALID", `region ${index} of the plan is missing`);
      const place: PassPlace = { plan, index, region, tokens, sharedHeads };
      yield { place, group };
    }
  }
}

function permuteBlocks(place: PassPlace, ids: Int32Array, bytes: Uint8Array): void {
  const { plan, region } = place;
  const shape = blockShape(place, region.blockLengthBytes);
  if (shape === undefined) return;
  const landed = new Uint8Array(region.blockLengthBytes);
  for (const id of ids) {
    const start = id * region.blockStrideBytes;
    permuteBlock(
      bytes.subarray(start, start + region.blockLengthBytes),
      landed,
      shape,
      plan.blockSizeRatio,
    );
  }
}

type AddRun = (offsetBytes: number, lengthBytes: number) => void;

/** Calls `add` with each run of bytes of a region that no transfer covered. */
function forUncovered(place: PassPlace, group: ReceivePassGroup, add: AddRun): void {
  const { plan, region } = place;
  const { leadingBlock, partialBlock, zeroBlockIds } = group;
  const { packedMembers } = plan.local;
  // Each page of a row is a block of one layer.
  const pages =
    packedMembers !== undefined && region.name in packedMembers
      ? Object.values(packedMembers)
      : [{ offsetBytes: 0, lengthBytes: region.blockLengthBytes }];
  for (const { offsetBytes, lengthBytes } of pages) {
    const start = (id: number) => id * region.blockStrideBytes + offsetBytes;
    const shape = blockShape(place, lengthBytes);
    if (leadingBlock !== undefined && shape !== undefined)
      forTokens(
        start(leadingBlock.blockId),
        shape,
        { from: 0, until: leadingBlock.untilToken },
        add,
      );
    if (partialBlock !== undefined && shape !== undefined) {
      const { blockId, fromToken } = partialBlock;
      forTokens(start(blockId), shape, { from: fromToken, until: shape.tokens }, add);
    }
    for (const id of zeroBlockIds) add(start(id), lengthBytes);
  }
}

/**
 * From `[parts][heads][tokens of a part]` to `[heads][tokens]`, or to `[tokens][heads]` for a
 * token-major cache.
 */
function permuteBlock(
  block: Uint8Array,
  landed: Uint8Array,
  shape: BlockShape,
  parts: number,
): void {
  const { heads, tokens, cellBytes, tokenMajor } = shape;
  landed.set(block);
  const partTokens = tokens / parts;
  const runBytes = partTokens * cellBytes;
  let from = 0;
  for (let part = 0; part < parts; part++) {
    for (let head = 0; head < heads; head++) {
      if (!tokenMajor) {
        block.set(
          landed.subarray(from, from + runBytes),
          (head * tokens + part * partTokens) * cellBytes,
        );
        from += runBytes;
        continue;
      }
      for (let token = part * partTokens; token < (part + 1) * partTokens; token++) {
        block.set(landed.subarray(from, from + cellBytes), (token * heads + head) * cellBytes);
        from += cellBytes;
      }
    }
  }
}

/** Calls `add` with the bytes of tokens in the block at an offset. */
function forTokens(
  offsetBytes: number,
  { heads, tokens, cellBytes, tokenMajor }: BlockShape,
  { from, until }: { from: number; until: number },
  add: AddRun,
): void {
  if (tokenMajor) {
    add(offsetBytes + from * heads * cellBytes, (until - from) * heads * cellBytes);
    return;
  }
  for (let head = 0; head < heads; head++)
    add(offsetBytes + (head * tokens + from) * cellBytes, (until - from) * cellBytes);
}

/**
 * The shape of a block; undefined for blocks whose cells hold several tokens each (compressed
 * latents): the engine masks those.
 */
function blockShape(place: PassPlace, lengthBytes: number): BlockShape | undefined {
  const { plan, index, region, tokens, sharedHeads } = place;
  const isOwn = region.numKvHeads !== undefined || region.replicated === true;
  const heads = (isOwn ? undefined : sharedHeads) ?? plan.headsOfRegion[index] ?? plan.localHeads;
  const cells = heads * tokens;
  if (heads === 1 && plan.blockSizeRatio === 1 && lengthBytes % cells !== 0) return undefined;
  if (lengthBytes % cells !== 0) {
    throw new KvError(
      "KV_PLAN_INVALID",
      `region "${region.name}": a block of ${lengthBytes} bytes does not divide into ${heads} heads of ${tokens} tokens`,
    );
  }
  return {
    heads,
    tokens,
    cellBytes: lengthBytes / cells,
    tokenMajor: orderOfLayout(plan.local.layout) === "token-major",
  };
}

function requireLength(region: RegionGeometry, bytes: Uint8Array): void {
  const needed = (region.numBlocks - 1) * region.blockStrideBytes + region.blockLengthBytes;
  if (bytes.byteLength >= needed) return;
  throw new KvError(
    "KV_PLAN_INVALID",
    `region "${region.name}": a view of ${bytes.byteLength} bytes is too short: ${region.numBlocks} blocks need ${needed}`,
    { details: { region: region.name, given: bytes.byteLength, needed } },
  );
}
