import type { RemoteEngine } from "@kv/connector/building-blocks";
import { type BlockIds, type KvCacheConfig, KvError } from "@kv/interface";
import { type EngineTransferPlan, exchangedBlocks, type ModelGeometry } from "@kv/plan";
import { checkedSide, type VllmLimit, vllmLimitOf } from "@kv/plan/vllm";
import type { RegistrationOrder } from "./step-metadata.js";

/** Looked up for each request, and found once for each engine. */
const limits = new WeakMap<EngineTransferPlan, { readonly limit: VllmLimit | undefined }>();

/** Why a vLLM 0.33 producer would not write for the engine of a plan. */
function limitOf(plan: EngineTransferPlan, model: ModelGeometry): VllmLimit | undefined {
  let found = limits.get(plan);
  if (found === undefined) {
    const limit = vllmLimitOf(
      {
        local: checkedSide(plan.remote),
        remote: checkedSide(plan.local),
        model,
        hasStates: plan.local.stateSpace !== undefined,
        mode: "push",
        checking: "prefill",
      },
      "0.33.0",
    );
    found = { limit };
    limits.set(plan, found);
  }
  return found.limit;
}

/**
 * Refuses what a vLLM 0.33 producer refuses itself, without a word to this side, and what it would
 * write wrongly.
 * @throws `KV_PLAN_UNSUPPORTED`, `KV_BLOCKS_MISMATCH`.
 */
export function assertVllmCanWrite(
  { plan, address }: RemoteEngine,
  order: RegistrationOrder,
  model: ModelGeometry,
): void {
  if (plan.local.kernelBlockSize !== plan.remote.kernelBlockSize) {
    throw new KvError(
      "KV_PLAN_UNSUPPORTED",
      `engine ${address.engineId} has kernel blocks of ${plan.remote.kernelBlockSize} tokens and this one of ${plan.local.kernelBlockSize}: a vLLM 0.33 prefill worker cannot push to such blocks`,
      { hint: "use equal block sizes, or pull" },
    );
  }
  const limit = limitOf(plan, model);
  if (limit !== undefined) {
    throw new KvError("KV_PLAN_UNSUPPORTED", `engine ${address.engineId}: ${limit.text}`, {
      hint: limit.fix,
      details: { factor: limit.factor, local: limit.decode, remote: limit.prefill },
    });
  }
  const empty = order.localBlockIds.findIndex((ids) => ids.length === 0);
  if (empty >= 0) {
    throw new KvError(
      "KV_BLOCKS_MISMATCH",
      `request ${order.requestId} wants no block of KV cache group ${empty}: a vLLM 0.33 prefill worker reads an empty group as all of its blocks`,
    );
  }
}

/**
 * Stands in for the producer's block ids before the producer has answered: as many for each group
 * as it will transfer. It clips windows and states as this engine does, in blocks of its own size.
 */
export function placeholderBlocks(
  { numTokens, localBlockIds }: RegistrationOrder,
  { plan }: RemoteEngine,
  groups: KvCacheConfig["groups"],
): BlockIds {
  const { dcpSize = 1 } = plan.remote;
  return localBlockIds.map((local, index) => {
    const group = groups[index];
    const { extent, remoteBlockTokens } = plan.groupPlans[index] ?? {};
    // A group without tokens has as many blocks at the producer as are wanted here.
    if (
      group === undefined ||
      remoteBlockTokens === undefined ||
      extent === "state" ||
      extent === "whole"
    ) {
      return local.map((_, i) => i);
    }
    const whole = Array.from(
      { length: Math.ceil(numTokens / (remoteBlockTokens * dcpSize)) },
      (_, i) => i,
    );
    const clipped = exchangedBlocks(
      [whole],
      { groups: [{ ...group, blockSize: remoteBlockTokens }], blockSize: remoteBlockTokens },
      { numTokens, dcpSize },
    );
    return (clipped[0] ?? []).map((_, i) => i);
  });
}
