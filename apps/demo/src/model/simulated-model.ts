import type { Clock } from "@kv/interface";
import type { EngineModel } from "../engine/engine-model.js";

export interface SimulatedModelOptions {
  readonly clock: Clock;
  readonly layers: number;
  readonly kvHeads: number;
  readonly headDim: number;
  readonly vocabSize: number;
  readonly maxModelLen: number;
  /** A forward pass takes so long, by the number of its tokens; each layer an equal part of it. */
  readonly forwardMsPer512Tokens: number;
}

/**
 * A model that takes time and computes nothing, to measure what is around it: KV that says which token stands where, next tokens that
 * follow from the last one. It does not look at KV: what was transferred is to be compared by its digests.
 */
export function simulatedModel(options: SimulatedModelOptions): EngineModel {
  const { clock, layers, kvHeads, headDim, vocabSize, maxModelLen, forwardMsPer512Tokens } = options;
  const width = 2 * headDim;
  /** Used again for the layers of a prompt: memory that is new costs more than all else here. There is one prompt in a step. */
  let ofPrompt = new Float32Array(0);
  const room = (tokens: number): Float32Array<ArrayBuffer> => {
    const length = kvHeads * tokens * width;
    if (tokens === 1) return new Float32Array(length);
    if (ofPrompt.length !== length) ofPrompt = new Float32Array(length);
    return ofPrompt;
  };
  return {
    config: { layers, kvHeads, headDim, vocabSize, maxModelLen, eosTokenIds: [] },
    ignoresPast: true,
    async forward({ tokens, position, topLogprobs = 1 }) {
      const newKv = (layer: number): ArrayBuffer => {
        const kv = room(tokens.length);
        for (let head = 0, at = 0; head < kvHeads; head++) {
          const row = layer * kvHeads + head;
          for (let i = 0; i < tokens.length; i++, at += width) {
            kv[at] = ((tokens[i] ?? 0) * 31 + row * 7 + (position + i) * 17) % 65_521;
          }
        }
        return kv.buffer;
      };
      const last = tokens.at(-1) ?? 0;
      const next = (last * 31 + (position + tokens.length) * 17 + 1) % vocabSize;
      const topTokens = Int32Array.from({ length: topLogprobs }, (_, i) => (next + i) % vocabSize);
      return { topTokens, topLogprobs: Float32Array.from(topTokens, (_, i) => -i), newKv };
    },
    async layerComputed({ startedMs, tokens, layer }) {
      const dueMs = startedMs + (forwardMsPer512Tokens * tokens * (layer + 1)) / (512 * layers);
      const leftMs = dueMs - clock.now();
      // A timer is a millisecond late or early: what a layer takes less is made up for by the next.
      if (leftMs < 0.5) return;
      await new Promise<void>((resolve) => void clock.setTimer(resolve, Math.round(leftMs), { ref: true }));
    },
    async dropSequence() {},
  };
}
