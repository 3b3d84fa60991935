import { KvError } from "@kv/interface";
import type { Exchange } from "./exchange.js";
import { gatherParts } from "./gather.js";
import type { LegOrder, LegOrderOptions } from "./leg-order.js";
import { mergeAnswers } from "./merge.js";
import { runAlone, runPromptOnly } from "./one-leg.js";
import { promptFieldsOf } from "./prompt-fields.js";
import { relay } from "./relay.js";
import { partsOf } from "./request-parts.js";

export interface GenerationFlow {
  readonly name: string;
  /** Writes the answer. Errors before the first byte are the caller's to write. */
  run(exchange: Exchange): Promise<void>;
  settled(): Promise<void>;
}

/** From a client's request to its answer: split where it must be, each part through its legs, and one answer made of theirs. */
export function createGenerationFlow(options: LegOrderOptions, order: LegOrder): GenerationFlow {
  const { policy, timeouts, limits } = options;
  return {
    name: order.name,
    settled: async () => order.settled?.(),
    async run(exchange) {
      const { request } = exchange;
      if (request.unsplittable !== undefined) {
        if (policy.unsplittable === "fail") throw cannotBeParted(request.unsplittable);
        return await relay(
          exchange,
          await runAlone(options, exchange, request.unsplittable, { whole: true }),
          timeouts.stallMs,
        );
      }
      if (promptFieldsOf(request) === "prompt-only")
        return await relay(exchange, await runPromptOnly(options, exchange), timeouts.stallMs);
      const parts = partsOf(request, limits.parts);
      const [only] = parts;
      if (parts.length === 1 && only !== undefined) {
        const answer = await order.run(exchange);
        if (answer.promptAnswer === undefined) return await relay(exchange, answer, timeouts.stallMs);
        const gathered = [{ ...only, answer, deadline: exchange.deadline, requestId: exchange.requestId }];
        return await mergeAnswers(options, exchange, gathered);
      }
      exchange.trail.parts = parts.length;
      const gathered = await gatherParts(exchange, order, parts);
      try {
        const refusal = gathered.find(({ answer }) => answer.status !== 200);
        if (refusal === undefined) return await mergeAnswers(options, exchange, gathered);
        return await relay(exchange, refusal.answer, timeouts.stallMs);
      } finally {
        for (const { answer, deadline } of gathered) {
          answer.discard();
          answer.visit.abandoned();
          deadline.close();
        }
      }
    },
  };
}

function cannotBeParted(why: string): KvError {
  return new KvError("KV_REQUEST_INVALID", `this request cannot be parted into prefill and decode: ${why}`, {
    hint: "send it without; or run the proxy with --unsplittable decode-computes, which hands such requests to a decode instance whole",
  });
}
