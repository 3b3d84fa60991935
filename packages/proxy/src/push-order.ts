import { refuseNobody } from "./attempts.js";
import type { LegAnswer, LegOrder, LegOrderOptions, Part } from "./leg-order.js";
import { createPullOrder } from "./pull-order.js";
import { createPushAtOnce, type Restart } from "./push-at-once.js";
import { ASK_FOR_PUSH, type CoordinatesBook, createCoordinatesBook } from "./push-coordinates.js";
import type { FailedAttempt, RetryPolicy } from "./retry.js";
import type { Role } from "./upstream.js";

export interface PushOrderOptions extends LegOrderOptions {
  /** Both legs at once (upstream today), or one after the other (vLLM's first push proxy). */
  readonly legs: "at-once" | "prefill-first";
  readonly newId: () => string;
  /** Where the prefill engines are; one of its own by default. */
  readonly book?: CoordinatesBook;
}

/**
 * The prefill worker writes the KV into the decode worker (vLLM's NixlPushConnector). At once: both legs leave together, the decode leg
 * with the prefill engine's coordinates; while those of the chosen instance are not known the legs go one after the other, and the
 * answer teaches them.
 */
export function createPushOrder(options: PushOrderOptions): LegOrder {
  const { prefillers, decoders, retry } = options;
  const { log, metrics } = options.ambient;
  const { book = createCoordinatesBook() } = options;
  const teaching: LegOrderOptions = {
    ...options,
    onKv(instance, params) {
      book.learn(instance, params);
      options.onKv?.(instance, params);
    },
  };
  const atOnce = createPushAtOnce({ ...options, book });
  const oneByOne = createPullOrder({ ...teaching, askForKv: ASK_FOR_PUSH });
  const oneMore = {
    prefill: createPullOrder({ ...teaching, askForKv: ASK_FOR_PUSH, retry: spentAt("prefill", retry) }),
    decode: createPullOrder({ ...teaching, askForKv: ASK_FOR_PUSH, retry: spentAt("decode", retry) }),
  };

  function beginAgain(given: Part, { why, failed, spent }: Restart): Promise<LegAnswer> {
    const { trail } = given;
    log.warn("push-began-again", {
      requestId: given.requestId,
      prefill: trail.prefill,
      decode: trail.decode,
      why,
    });
    metrics.count("kv_proxy_restarts_total");
    trail.restarts = (trail.restarts ?? 0) + 1;
    delete trail.decodeStartedAtMs;
    const avoid = new Set(failed === undefined ? [] : [failed]);
    const order = spent === undefined ? oneByOne : oneMore[spent];
    return order.run({
      ...given,
      requestId: `${given.requestId}-${options.newId()}`,
      ...(failed?.role === "prefill" ? { avoidPrefill: avoid } : { avoidDecode: avoid }),
    });
  }

  return {
    name: options.legs === "at-once" ? "push" : "push, prefill first",
    async run(given) {
      // The two engines find each other by this id: one that a client uses twice would find another prompt's KV.
      const part: Part = { ...given, requestId: `${given.requestId}-${options.newId()}` };
      if (options.legs === "at-once") {
        refuseNobody(decoders);
        const instance = prefillers.choose(part, new Set());
        const coordinates = instance === undefined ? undefined : book.of(instance);
        if (instance !== undefined && coordinates !== undefined) {
          const answer = await atOnce.run(part, instance.begin(), coordinates);
          return "why" in answer ? await beginAgain(given, answer) : answer;
        }
        // Its answer is to teach where it is: another instance in its place would leave that unknown.
        if (instance !== undefined) return oneByOne.run({ ...part, preferredPrefill: instance });
      }
      return oneByOne.run(part);
    },
    async settled() {
      const orders = [atOnce, oneByOne, oneMore.prefill, oneMore.decode];
      await Promise.all(orders.map((order) => order.settled?.()));
    },
  };
}

/** The policy for a part that has failed once at `role` already. */
function spentAt(role: Role, retry: RetryPolicy): RetryPolicy {
  const counted = (failed: FailedAttempt) =>
    failed.role === role ? { ...failed, attempt: failed.attempt + 1 } : failed;
  return {
    again: (failed) => retry.again(counted(failed)),
    afresh: (failed) => retry.afresh(counted(failed)),
  };
}
