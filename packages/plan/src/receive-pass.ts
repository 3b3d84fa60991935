import { KvError } from "@kv/interface";
import type { EngineTransferPlan } from "./engine-plan-types.js";
import type { RegionGeometry } from "./geometry.js";
import { orderOfLayout } from "./layout.js";
import type { ReceivePass, ReceivePassGroup } from "./request-plan-types.js";

/** The inside of a block: `heads` × `tokens` cells of `cellBytes` (K and V of one head and token). */
interface BlockShape {
  readonly heads: number;
  readonly tokens: number;
  readonly cellBytes: number;
  readonly tokenMajor: boolean;
}

/**
 * Puts the received blocks right, in place. `regionBytes[i]` is a view of local region i from its base address on, its padding
 * included. Call it once, after every read of the request has landed. Errors: `KV_PLAN_INVALID` when a view is too short or a block
 * does not divide into its heads and tokens.
 */
export function applyReceivePass(
  plan: EngineTransferPlan,
  pass: ReceivePass,
  regionBytes: readonly Uint8Array[],
): void {
  for (const group of pass.groups) {
    for (const index of plan.regionsOfGroup[group.group] ?? []) {
      const region = plan.local.regions[index];
      const bytes = regionBytes[index];
      if (region === undefined || bytes === undefined) {
        throw new KvError("KV_PLAN_INVALID", `region ${index} of the plan: no view of its bytes was given`);
      }
      requireLength(region, bytes);
      applyToRegion(plan, group, index, region, bytes);
    }
  }
}

function applyToRegion(
  plan: EngineTransferPlan,
  group: ReceivePassGroup,
  index: number,
  region: RegionGeometry,
  bytes: Uint8Array,
): void {
  const block = (id: number) => {
    const start = id * region.blockStrideBytes;
    return bytes.subarray(start, start + region.blockLengthBytes);
  };
  const { packedMembers } = plan.local;
  if (packedMembers !== undefined && region.name in packedMembers) {
    // Each page of a row is a block of its own layer.
    for (const { offsetBytes, lengthBytes } of Object.values(packedMembers)) {
      const page = (id: number) => block(id).subarray(offsetBytes, offsetBytes + lengthBytes);
      zeroUncovered(
        group,
        page,
        blockShape(plan, group.group, index, { ...region, blockLengthBytes: lengthBytes }),
      );
    }
    return;
  }
  const shape = blockShape(plan, group.group, index, region);
  const landed = group.permuteBlockIds.length > 0 ? new Uint8Array(region.blockLengthBytes) : bytes;
  if (shape !== undefined)
    for (const id of group.permuteBlockIds) permuteBlock(block(id), landed, shape, plan.blockSizeRatio);
  zeroUncovered(group, block, shape);
}

function zeroUncovered(
  { partialBlock, zeroBlockIds }: ReceivePassGroup,
  block: (id: number) => Uint8Array,
  shape: BlockShape | undefined,
): void {
  if (partialBlock !== undefined && shape !== undefined)
    zeroTokens(block(partialBlock.blockId), shape, partialBlock.fromToken);
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
): void {
  if (tokenMajor) {
    block.fill(0, fromToken * heads * cellBytes);
    return;
  }
  for (let head = 0; head < heads; head++) {
    block.fill(0, (head * tokens + fromToken) * cellBytes, (head + 1) * tokens * cellBytes);
  }
}

/** Undefined for blocks whose cells stand for several tokens each (compressed latents): what is in them is the engine's to mask. */
function blockShape(
  plan: EngineTransferPlan,
  group: number,
  index: number,
  region: RegionGeometry,
): BlockShape | undefined {
  const groupPlan = plan.groupPlans[group];
  const heads = plan.headsOfRegion[index] ?? plan.localHeads;
  const tokens =
    groupPlan === undefined ? plan.local.kernelBlockSize : groupPlan.partTokens * groupPlan.localParts;
  const cells = heads * tokens;
  if (heads === 1 && plan.blockSizeRatio === 1 && region.blockLengthBytes % cells !== 0) return undefined;
  if (region.blockLengthBytes % cells !== 0) {
    throw new KvError(
      "KV_PLAN_INVALID",
      `region "${region.name}": a block of ${region.blockLengthBytes} bytes does not divide into ${heads} heads of ` +
        `${tokens} tokens`,
    );
  }
  return {
    heads,
    tokens,
    cellBytes: region.blockLengthBytes / cells,
    tokenMajor: heads === 1 || orderOfLayout(plan.local.layout) === "token-major",
  };
}

function requireLength(region: RegionGeometry, bytes: Uint8Array): void {
  const needed = (region.numBlocks - 1) * region.blockStrideBytes + region.blockLengthBytes;
  if (bytes.byteLength >= needed) return;
  throw new KvError(
    "KV_PLAN_INVALID",
    `region "${region.name}": a view of ${bytes.byteLength} bytes was given, its ${region.numBlocks} blocks need ${needed}`,
    { details: { region: region.name, given: bytes.byteLength, needed } },
  );
}
