import type { Clock, WorkerConnector } from "@kv/interface";
import type { KvPool } from "./cache/kv-pool.js";
import type { EngineModel, ForwardOutput } from "./engine-model.js";
import { blocksFor, type EngineToken, type RequestRecord } from "./request.js";

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
   * Computes the next `numTokens` tokens of a running request that have no KV yet. Samples the next
   * token when these were the last ones; undefined for a part of a prompt. The KV of earlier tokens
   * is read from the pool unless the model holds it, so that KV from the prefix cache or from a
   * peer is what is used.
   */
  async advance(record: RequestRecord, numTokens: number): Promise<EngineToken | undefined> {
    const { model, pool, clock } = this.#options;
    const startedMs = clock.now();
    record.startedMs ??= startedMs;
    const { request, blockIds, sampler, numComputedTokens: position } = record;
    const promptLength = request.promptTokens.length;
    const reportLayers = this.#options.reportLayers && position < promptLength;
    const { sequence } = record;
    const end = position + numTokens;
    const tokens = Int32Array.from(sequence.slice(position, end));
    const wanted = request.topLogprobs ?? 0;
    const { newKv, ...candidates } = await model.forward({
      sequenceId: request.requestId,
      tokens,
      position,
      topLogprobs: Math.min(Math.max(sampler.candidates, wanted), model.config.vocabSize),
      past: await this.#readPast(record),
    });
    record.modelHasPast = true;
    if (position < promptLength && end >= promptLength) {
      // Before the layers: a peer may be sent a block as soon as its layer is reported.
      await pool.zeroTail(
        blockIds.slice(0, blocksFor(promptLength, pool.config.blockSize)),
        promptLength,
      );
    }
    await this.#storeKv(record, newKv, {
      startedMs,
      position,
      tokens: tokens.length,
      reportLayers,
    });
    record.numComputedTokens = end;
    record.forwardMs += clock.now() - startedMs;
    if (end < sequence.length) return undefined;
    const token = sampler.choose(candidates);
    const { topTokens, topLogprobs } = candidates;
    const sampled: EngineToken = {
      token,
      logprob: topLogprobs[topTokens.indexOf(token)] ?? Number.NEGATIVE_INFINITY,
      top: Array.from(topTokens.subarray(0, wanted), (id, i) => ({
        token: id,
        logprob: topLogprobs[i] ?? Number.NEGATIVE_INFINITY,
      })),
    };
    record.output.push(sampled);
    return sampled;
  }

  async #readPast({ modelHasPast, blockIds, numComputedTokens: count }: RequestRecord) {
    const { model, pool } = this.#options;
    if (modelHasPast || count === 0 || model.ignoresPast === true) return undefined;
    return { tokens: count, kv: await pool.read({ blockIds, from: 0, count }) };
  }

  async #storeKv(
    record: RequestRecord,
    newKv: ForwardOutput["newKv"],
    pass: { startedMs: number; position: number; tokens: number; reportLayers: boolean },
  ): Promise<void> {
    const { model, pool } = this.#options;
    const { startedMs, position, tokens, reportLayers } = pass;
    const span = { blockIds: record.blockIds, from: position, count: tokens };
    const { layers } = model.config;
    if (typeof newKv !== "function" && !reportLayers && model.layerComputed === undefined) {
      await pool.write(span, newKv);
      return;
    }
    const layerKv =
      typeof newKv === "function" ? newKv : (layer: number) => sliceLayer(newKv, layer, layers);
    for (let layer = 0; layer < layers; layer++) {
      const buffer = await pool.writeLayer(span, layer, layerKv(layer));
      model.layerStored?.(buffer);
      await model.layerComputed?.({ startedMs, tokens, layer });
      if (reportLayers) this.#reportLayer(record, layer, position + tokens);
    }
  }

  #reportLayer({ request: { requestId } }: RequestRecord, layer: number, tokens: number): void {
    const { model, pool, workers } = this.#options;
    for (const [rank, worker] of workers.entries()) {
      const names = pool.caches[rank]?.regions.map(({ name }) => name) ?? [];
      const perLayer = names.length / model.config.layers;
      const regions = names.slice(layer * perLayer, (layer + 1) * perLayer);
      worker.layerComputed?.({ regions, computedTokens: { [requestId]: tokens } });
    }
  }
}

function sliceLayer(kv: ArrayBuffer, layer: number, layers: number): ArrayBuffer {
  const lengthBytes = kv.byteLength / layers;
  return kv.slice(layer * lengthBytes, (layer + 1) * lengthBytes);
}
