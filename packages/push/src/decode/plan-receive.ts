import { ReceiveBroken, type RemoteLink } from "@kv/connector";
import { type BlockIds, type KvCacheConfig, KvError } from "@kv/interface";
import { exchangedBlocks, planRequest, type RequestPlan } from "@kv/plan";
import { PUSH_CONTROL } from "../control.js";
import type { RegistrationOrder } from "../step-metadata.js";

export interface ReceivedGroups {
  readonly groups: KvCacheConfig["groups"];
  readonly tpSize: number;
}

/** What will land, for the receive pass, and proof that it can: a pair that does not fit is refused before a block is offered. */
export function plannedReceive(
  link: RemoteLink,
  order: RegistrationOrder,
  { groups, tpSize }: ReceivedGroups,
): RequestPlan {
  const { plan, features, address } = link;
  try {
    if (!features.has(PUSH_CONTROL)) {
      if (plan.local.kernelBlockSize !== plan.remote.kernelBlockSize) {
        throw new KvError(
          "KV_PLAN_UNSUPPORTED",
          `engine ${address.engineId} has kernel blocks of ${plan.remote.kernelBlockSize} tokens and this one of ${plan.local.kernelBlockSize}: a vLLM 0.33 prefill worker cannot push to such blocks`,
          { hint: "use equal block sizes, or pull" },
        );
      }
      const empty = order.localBlockIds.findIndex((ids) => ids.length === 0);
      if (empty >= 0) {
        throw new KvError(
          "KV_BLOCKS_MISMATCH",
          `request ${order.requestId} wants no block of KV cache group ${empty}: a vLLM 0.33 prefill worker would take that for all of them`,
        );
      }
    }
    return planRequest(plan, {
      localBlockIds: order.localBlockIds,
      // Which blocks the producer has is its own affair; how many tells where ours begin.
      remoteBlockIds: order.remoteBlockIds ?? standIns(order, link, groups),
      numTokens: order.numTokens,
      localComputedBlocks: order.localComputedBlocks,
    });
  } catch (error) {
    throw new ReceiveBroken(
      KvError.from(error, "KV_TRANSFER_INVALID", `request ${order.requestId} on ${tpSize} ranks`),
      "transfer_setup_failed",
    );
  }
}

/**
 * As many blocks of each group as the producer will hand over: it clips windows and states as this engine does, in blocks of its own, and has
 * not said yet which they are.
 */
function standIns(
  { numTokens, localBlockIds }: RegistrationOrder,
  { plan }: RemoteLink,
  groups: KvCacheConfig["groups"],
): BlockIds {
  return localBlockIds.map((local, index) => {
    const group = groups[index];
    const { extent, remoteBlockTokens } = plan.groupPlans[index] ?? {};
    // Of what has no tokens it has as many as are wanted.
    if (group === undefined || remoteBlockTokens === undefined || extent === "state" || extent === "whole") {
      return local.map((_, i) => i);
    }
    const whole = Array.from({ length: Math.ceil(numTokens / remoteBlockTokens) }, (_, i) => i);
    const clipped = exchangedBlocks(
      [whole],
      { groups: [{ ...group, blockSize: remoteBlockTokens }], blockSize: remoteBlockTokens },
      { numTokens },
    );
    return (clipped[0] ?? []).map((_, i) => i);
  });
}
