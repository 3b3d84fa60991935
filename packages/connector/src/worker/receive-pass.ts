import { type KvCaches, KvError } from "@kv/interface";
import { applyReceivePass, type RequestPlan } from "@kv/plan";
import type { RemoteLink } from "../peers/remote-engine.js";

/**
 * What is left to do when the last byte of a request has landed: heads and tokens in order, the uncovered tail zeroed.
 */
export function createReceivePass({
  caches,
}: {
  caches: KvCaches;
}): (_: unknown, link: RemoteLink, plan: RequestPlan) => Promise<void> {
  // Device memory has no bytes to look at: a pair that needs a pass there is refused when it comes to it, with the way out.
  const views = caches.regions.map(({ memory, offsetBytes, memoryType }) =>
    memoryType === "DRAM" ? memory.bytes.subarray(offsetBytes) : undefined,
  );
  return async (_, link, { receivePass }) => {
    if (receivePass !== undefined) {
      const bytes = views.map((view, index) => {
        if (view !== undefined) return view;
        throw new KvError(
          "KV_PLATFORM_UNSUPPORTED",
          `region ${caches.regions[index]?.name} is in device memory, and blocks from engine ${link.address.engineId} need a pass over them`,
          {
            hint: "stage the cache through host memory, or use equal block sizes and prompts of whole blocks",
          },
        );
      });
      applyReceivePass(link.plan, receivePass, bytes);
    }
  };
}
