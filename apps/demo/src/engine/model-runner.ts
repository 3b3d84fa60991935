import type { Clock, WorkerConnector } from "@kv/interface";
import type { KvPool } from "./cache/kv-pool.js";
import type { EngineModel, ForwardOutput } from "./engine-model.js";
import { blocksFor, type RequestRecord } from "./request.js";

export interface ModelRunnerOptions {
  readonly model: EngineModel;
  readonly pool: KvPool;
  readonly clock: Pick<Clock, "now">;
  readonly workers: readonly WorkerConnector[];
  readonly reportLayers: boolean;
}

export class ModelRunner {
  readonly #options: ModelRunnerOptions;

  constructor(options: ModelRunnerOptions) {
    this.#options = options;
  }

  /**
   * Computes the next `numTokens` tokens of a running request. Samples the next token when these
   * were the last ones; undefined for a part of a prompt. The KV of earlier tokens is read from the
   * pool unless the model holds it.
   */
  async advance(record: RequestRecord, numTokens: number): Promise<number | undefined> {
    const { model, pool, clock } = this.#options;
    const startedMs = clock.now();
    record.startedMs ??= startedMs;
    const { request, blockIds, sampler, sequence, numComputedTokens: position } = record;
    const promptLength = request.promptTokens.length;
    const end = position + numTokens;
    const needsPast = !record.modelHasPast && position > 0 && model.ignoresPast !== true;
    const { newKv, topTokens, topLogprobs } = await model.forward({
      sequenceId: request.requestId,
      tokens: Int32Array.from(sequence.slice(position, end)),
      position,
      topLogprobs: Math.min(sampler.candidates, model.config.vocabSize),
      past: needsPast
        ? { tokens: position, kv: await pool.read({ blockIds, from: 0, count: position }) }
        : undefined,
    });
    record.modelHasPast = true;
    if (position < promptLength && end >= promptLength) {
      // Before the layers: a peer may be sent a block as soon as its layer is reported.
      const prompt = blockIds.slice(0, blocksFor(promptLength, pool.config.blockSize));
      await pool.zeroTail(prompt, promptLength);
    }
    await this.#storeKv(record, newKv, numTokens, startedMs);
    record.numComputedTokens = end;
    record.forwardMs += clock.now() - startedMs;
    if (end < sequence.length) return undefined;
    const token = sampler.choose({ topTokens, topLogprobs });
    record.output.push(token);
    return token;
  }

  async #storeKv(
    { request, blockIds, numComputedTokens: from }: RequestRecord,
    newKv: ForwardOutput["newKv"],
    count: number,
    startedMs: number,
  ): Promise<void> {
    const { model, pool, workers } = this.#options;
    const { layers } = model.config;
    const span = { blockIds, from, count };
    const reportLayers = this.#options.reportLayers && from < request.promptTokens.length;
    if (typeof newKv !== "function" && !reportLayers) {
      await pool.write(span, newKv);
      return;
    }
    const computedTokens = { [request.requestId]: from + count };
    for (let layer = 0; layer < layers; layer++) {
      const kv = typeof newKv === "function" ? newKv(layer) : layerOf(newKv, layer, layers);
      const written = await pool.write(span, kv, [layer]);
      model.layerStored?.(written);
      await model.layerComputed?.({ startedMs, tokens: count, layer });
      if (!reportLayers) continue;
      for (const [rank, worker] of workers.entries()) {
        const names = pool.caches[rank]?.regions.map(({ name }) => name) ?? [];
        const perLayer = names.length / layers;
        const regions = names.slice(layer * perLayer, (layer + 1) * perLayer);
        worker.layerComputed?.({ regions, computedTokens });
      }
    }
  }
}

function layerOf(kv: ArrayBuffer, layer: number, layers: number): ArrayBuffer {
  const lengthBytes = kv.byteLength / layers;
  return kv.slice(layer * lengthBytes, (layer + 1) * lengthBytes);
}
