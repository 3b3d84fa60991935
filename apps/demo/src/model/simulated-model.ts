import type { Clock } from "@kv/interface";
import type { EngineModel } from "../engine/engine-model.js";

export interface SimulatedModelOptions {
  readonly clock: Clock;
  readonly layers: number;
  readonly kvHeads: number;
  readonly headDim: number;
  readonly vocabSize: number;
  readonly maxModelLen: number;
  /** Proportional to the number of tokens; each layer takes an equal part. */
  readonly forwardMsPer512Tokens: number;
  /** An accelerator reads all weights for each pass. Default: 0. */
  readonly leastPassMs?: number | undefined;
}

/**
 * A model for benchmarks that takes time and computes nothing. Its KV encodes token and position,
 * and the next token follows from the last one, not from past KV.
 */
export function simulatedModel(options: SimulatedModelOptions): EngineModel {
  const {
    clock,
    layers,
    kvHeads,
    headDim,
    vocabSize,
    maxModelLen,
    forwardMsPer512Tokens,
    leastPassMs = 0,
  } = options;
  const width = 2 * headDim;
  /** Of one layer. */
  const tokenBytes = kvHeads * width * Float32Array.BYTES_PER_ELEMENT;
  /** Of a layer that was stored. Megabytes of new buffers would make V8 run full collections. */
  let spare: ArrayBuffer | undefined;
  const bufferFor = (tokens: number): Float32Array<ArrayBuffer> => {
    const lengthBytes = tokens * tokenBytes;
    const buffer = spare?.byteLength === lengthBytes ? spare : new ArrayBuffer(lengthBytes);
    if (buffer === spare) spare = undefined;
    return new Float32Array(buffer);
  };
  return {
    config: { layers, kvHeads, headDim, vocabSize, maxModelLen, eosTokenIds: [] },
    ignoresPast: true,
    async forward({ tokens, position, topLogprobs = 1 }) {
      const newKv = (layer: number): ArrayBuffer => {
        const kv = bufferFor(tokens.length);
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
      const passMs = Math.max(leastPassMs, (forwardMsPer512Tokens * tokens) / 512);
      const dueMs = startedMs + (passMs * (layer + 1)) / layers;
      const leftMs = dueMs - clock.now();
      // Timers are off by up to a millisecond; the next layer makes up for it.
      if (leftMs < 0.5) return;
      await new Promise<void>(
        (resolve) => void clock.setTimer(resolve, Math.round(leftMs), { ref: true }),
      );
    },
    layerStored(buffer) {
      // One step has at most one prompt. A single token's buffer is small.
      if (buffer.byteLength > tokenBytes) spare = buffer;
    },
    async dropSequence() {},
  };
}
