import type { DecoderSession, Past } from "./decoder-session.js";
import { topLogprobs } from "./top-logprobs.js";
import { packWire } from "./wire-order.js";
import { FaultError, type ForwardDone, type ForwardJob } from "./worker-protocol.js";

/** The sequences of one worker: each keeps its past between its steps. */
export interface Sequences {
  forward(job: ForwardJob): Promise<ForwardDone>;
  drop(sequenceId: string): void;
}

export function sequences(decoder: DecoderSession): Sequences {
  const pasts = new Map<string, Past>();

  return {
    async forward(job) {
      const before = performance.now();
      const past = pastFor(job);
      // Until the step has succeeded there is no past: a failed step must not be continued by accident.
      const kept = job.past === undefined && job.position > 0;
      if (!kept) pasts.delete(job.sequenceId);
      const step = await decoder.run(past, job.tokens);
      const top = topLogprobs(step.logits, job.topLogprobs);
      if (top === undefined) {
        throw new FaultError({
          code: "KV_ENGINE_FAILED",
          message: `the logits after position ${step.past.tokens - 1} of sequence ${job.sequenceId} are not finite`,
          hint: "the KV cache that was loaded for it is probably damaged",
        });
      }
      pasts.set(job.sequenceId, step.past);
      const { kvHeads, headDim } = decoder.shape;
      const newKv = job.returnKv
        ? packWire(decoder.layersOf(step.past), {
            kvHeads,
            headDim,
            total: step.past.tokens,
            from: past.tokens,
            to: step.past.tokens,
          })
        : undefined;
      return {
        topTokens: top.tokens,
        topLogprobs: top.logprobs,
        newKv,
        computeMs: performance.now() - before,
      };
    },
    drop(sequenceId) {
      pasts.delete(sequenceId);
    },
  };

  function pastFor({ sequenceId, position, past }: ForwardJob): Past {
    if (past !== undefined) {
      return decoder.pastFromWire(past.kv, past.tokens);
    }
    if (position === 0) return decoder.emptyPast();
    const held = pasts.get(sequenceId);
    if (held?.tokens === position) return held;
    throw new FaultError({
      code: "KV_REQUEST_INVALID",
      message: `sequence ${sequenceId} is asked to go on at position ${position}, the model holds ${held?.tokens ?? "nothing"} of it`,
      hint: "give its past again",
      details: { sequenceId, position, held: held?.tokens ?? 0 },
    });
  }
}
