import { KvError } from "@kv/interface";
import type { EngineTransferPlan } from "../engine/engine-plan-types.js";
import { orderOfLayout } from "../geometry/layout.js";
import type { RegionGeometry } from "../geometry/rank-geometry.js";
import type { ReceivePass, ReceivePassGroup } from "../request/request-plan-types.js";

/** The inside of a block: `heads` × `tokens` cells of `cellBytes` (K and V of one head and token). */
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
 * Puts received blocks in order and zeroes uncovered tokens, in place. `regionBytes[i]` is a view of local region `i` from its base address on, padding
 * included. Call it once, after all reads of the request have landed. Errors: `KV_PLAN_INVALID` when a view is too short, a block does not divide into
 * its heads and tokens, or the pass belongs to another plan.
 */
export function applyReceivePass(
  plan: EngineTransferPlan,
  pass: ReceivePass,
  regionBytes: readonly Uint8Array[],
): void {
  for (const group of pass.groups) {
    const regions = plan.regionsOfGroup[group.group];
    const groupPlan = plan.groupPlans[group.group];
    if (regions === undefined || groupPlan === undefined)
      throw new KvError("KV_PLAN_INVALID", `group ${group.group} of the receive pass is not in the plan`);
    const { sharedHeads } = groupPlan;
    const tokens = groupPlan.partTokens * groupPlan.localParts;
    for (const index of regions) {
      const region = plan.local.regions[index];
      const bytes = regionBytes[index];
      if (region === undefined || bytes === undefined) {
        throw new KvError("KV_PLAN_INVALID", `region ${index} of the plan: no view of its bytes is given`);
      }
      requireLength(region, bytes);
      applyToRegion({ plan, index, region, tokens, sharedHeads }, group, bytes);
    }
  }
}

function applyToRegion(place: PassPlace, group: ReceivePassGroup, bytes: Uint8Array): void {
  const { plan, region } = place;
  const block = (id: number) => {
    const start = id * region.blockStrideBytes;
    return bytes.subarray(start, start + region.blockLengthBytes);
  };
  const { packedMembers } = plan.local;
  if (packedMembers !== undefined && region.name in packedMembers) {
    // Each page of a row is a block of one layer.
    for (const { offsetBytes, lengthBytes } of Object.values(packedMembers)) {
      const page = (id: number) => block(id).subarray(offsetBytes, offsetBytes + lengthBytes);
      zeroUncovered(group, page, blockShape(place, lengthBytes));
    }
    return;
  }
  const shape = blockShape(place, region.blockLengthBytes);
  const landed = group.permuteBlockIds.length > 0 ? new Uint8Array(region.blockLengthBytes) : bytes;
  if (shape !== undefined)
    for (const id of group.permuteBlockIds) permuteBlock(block(id), landed, shape, plan.blockSizeRatio);
  zeroUncovered(group, block, shape);
}

function zeroUncovered(
  { leadingBlock, partialBlock, zeroBlockIds }: ReceivePassGroup,
  block: (id: number) => Uint8Array,
  shape: BlockShape | undefined,
): void {
  if (leadingBlock !== undefined && shape !== undefined)
    zeroTokens(block(leadingBlock.blockId), shape, 0, leadingBlock.untilToken);
  if (partialBlock !== undefined && shape !== undefined)
    zeroTokens(block(partialBlock.blockId), shape, partialBlock.fromToken, shape.tokens);
  for (const id of zeroBlockIds) block(id).fill(0);
}

/** From `[parts][heads][tokens of a part]` to `[heads][tokens]`, or to `[tokens][heads]` for a token-major cache. */
function permuteBlock(block: Uint8Array, landed: Uint8Array, shape: BlockShape, parts: number): void {
  const { heads, tokens, cellBytes, tokenMajor } = shape;
  landed.set(block);
  const partTokens = tokens / parts;
  const runBytes = partTokens * cellBytes;
  let from = 0;
  for (let part = 0; part < parts; part++) {
    for (let head = 0; head < heads; head++) {
      if (!tokenMajor) {
        block.set(landed.subarray(from, from + runBytes), (head * tokens + part * partTokens) * cellBytes);
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

function zeroTokens(
  block: Uint8Array,
  { heads, tokens, cellBytes, tokenMajor }: BlockShape,
  fromToken: number,
  untilToken: number,
): void {
  if (tokenMajor) {
    block.fill(0, fromToken * heads * cellBytes, untilToken * heads * cellBytes);
    return;
  }
  for (let head = 0; head < heads; head++) {
    block.fill(0, (head * tokens + fromToken) * cellBytes, (head * tokens + untilToken) * cellBytes);
  }
}

/** The shape of a block; undefined for blocks whose cells hold several tokens each (compressed latents): the engine masks those. */
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
