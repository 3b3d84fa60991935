import type { Instance } from "./instance.js";
import type { LegOrder } from "./leg-order.js";
import { createPullOrder } from "./pull-order.js";
import { createCoordinatesBook } from "./push-coordinates.js";
import { createPushOrder, type PushOrderOptions } from "./push-order.js";

/**
 * The order that each prefill instance's connector wants, learned from its answers: vLLM (0.32, 0.33) says `transfer_mode` in its
 * `kv_transfer_params`. The first request to an instance goes prefill first under an id that no other has, which serves both: a decode
 * worker pulls, or registers with what the answer says. A fleet may hold both kinds.
 */
export function createAutoOrder(options: PushOrderOptions): LegOrder {
  const { prefillers, newId } = options;
  const modes = new WeakMap<Instance, "pull" | "push">();
  const book = createCoordinatesBook();
  const learning: PushOrderOptions = {
    ...options,
    book,
    onKv(instance, kvTransferParams) {
      const { transfer_mode: mode } = JSON.parse(kvTransferParams) as { transfer_mode?: unknown };
      modes.set(instance, mode === "push" ? "push" : "pull");
      book.learn(instance, kvTransferParams);
      options.onKv?.(instance, kvTransferParams);
    },
  };
  const pull = createPullOrder(learning);
  const push = createPushOrder(learning);

  return {
    name: "auto",
    run(given) {
      const instance = prefillers.choose(given, new Set());
      const part = instance === undefined ? given : { ...given, preferredPrefill: instance };
      const mode = instance === undefined ? undefined : modes.get(instance);
      if (mode === "pull") return pull.run(part);
      if (mode === "push") return push.run(part);
      return pull.run({ ...part, requestId: `${given.requestId}-${newId()}` });
    },
    async settled() {
      await Promise.all([pull.settled?.(), push.settled?.()]);
    },
  };
}
