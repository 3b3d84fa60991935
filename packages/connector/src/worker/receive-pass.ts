import { type KvCaches, KvError } from "@kv/interface";
import { applyReceivePass, type RequestPlan } from "@kv/plan";
import type { RemoteEngine } from "../peers/remote-engine.js";

/** The pass over D's blocks after a request's last byte has landed: it reorders heads and tokens and zeroes uncovered tokens. */
export class ReceivePass {
  readonly #caches: KvCaches;
  /** Bytes of each region; undefined for device memory, which this process cannot address. */
  readonly #views: readonly (Uint8Array | undefined)[];

  constructor(caches: KvCaches) {
    this.#caches = caches;
    this.#views = caches.regions.map(({ memory, offsetBytes, memoryType }) =>
      memoryType === "DRAM" ? memory.bytes.subarray(offsetBytes) : undefined,
    );
  }

  /** Applies a request's pass; no effect when the plan needs none. Errors: `KV_PLATFORM_UNSUPPORTED` for device memory. */
  apply({ plan, address }: RemoteEngine, { receivePass }: RequestPlan): void {
    if (receivePass === undefined) return;
    const bytes = this.#views.map((view, index) => {
      if (view !== undefined) return view;
      throw new KvError(
        "KV_PLATFORM_UNSUPPORTED",
        `region ${this.#caches.regions[index]?.name} is in device memory, but blocks from engine ${address.engineId} need a receive pass in host memory`,
        {
          hint: "stage the cache through host memory, or use equal block sizes and prompts of whole blocks",
        },
      );
    });
    applyReceivePass(plan, receivePass, bytes);
  }
}
