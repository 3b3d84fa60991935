import { type KvCacheRegion, type KvCaches, KvError } from "@kv/interface";
import { applyReceivePass, type RequestPlan } from "@kv/plan";
import type { RemoteEngine } from "../peers/remote-engine.js";

/** The pass over D's blocks after a request's last byte has landed: it reorders heads and tokens and zeroes uncovered tokens. */
export class ReceivePass {
  readonly #caches: KvCaches;
  /** Bytes of each region, once a request needed them. */
  #views: readonly Uint8Array[] | undefined;

  constructor(caches: KvCaches) {
    this.#caches = caches;
  }

  /** Applies a request's pass; no effect when the plan needs none. Errors: `KV_PLATFORM_UNSUPPORTED` for device memory. */
  apply({ plan, address }: RemoteEngine, { receivePass }: RequestPlan): void {
    if (receivePass === undefined) return;
    this.#views ??= this.#caches.regions.map((region) => viewOf(region, address));
    applyReceivePass(plan, receivePass, this.#views);
  }
}

function viewOf(region: KvCacheRegion, { engineId }: RemoteEngine["address"]): Uint8Array {
  const { name, memory, memoryType, offsetBytes, numBlocks, blockLengthBytes, blockStrideBytes } = region;
  if (memoryType !== "DRAM") {
    throw new KvError(
      "KV_PLATFORM_UNSUPPORTED",
      `region ${name} is in device memory, but blocks from engine ${engineId} need a receive pass in host memory`,
      {
        hint: "stage the cache through host memory, or use equal block sizes and prompts of whole blocks",
      },
    );
  }
  return memory.view(offsetBytes, (numBlocks - 1) * blockStrideBytes + blockLengthBytes);
}
