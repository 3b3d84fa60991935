import type { Clock } from "@kv/interface";
import { blocksFor } from "./admission.js";
import { type BlockPool, blockHashes } from "./cache/block-pool.js";
import type { KvPool } from "./cache/kv-pool.js";
import type { EngineModel, ForwardOutput } from "./engine-model.js";
import type { EngineToken, RequestRecord } from "./request.js";

export interface ForwardOptions {
  readonly model: EngineModel;
  readonly pool: KvPool;
  readonly blocks: BlockPool;
  readonly clock: Pick<Clock, "now">;
  /** A layer of the request's KV is in the pool, of so many tokens. Absent: the pool is written in one go. */
  layerInPool?(record: RequestRecord, layer: number, tokens: number): void;
}

/** More than the last token of the prompt is yet to compute. */
export function isPrefill(record: RequestRecord): boolean {
  return record.numComputedTokens < record.request.promptTokens.length - 1;
}

/**
 * Computes all tokens of a running request that have no KV yet, and samples one more. Where the model does not have the tokens before
 * (a prefix hit, KV from a peer) they are read from the pool: what was transferred is what is used.
 */
export async function advance(record: RequestRecord, options: ForwardOptions): Promise<EngineToken> {
  const { model, pool, blocks } = options;
  const startedMs = options.clock.now();
  const { request, blockIds, sampler, numComputedTokens: position } = record;
  const promptLength = request.promptTokens.length;
  const tokens = Int32Array.from(sequenceOf(record).slice(position));
  const past =
    record.modelHasPast || position === 0 || model.ignoresPast === true
      ? undefined
      : { tokens: position, kv: await pool.read({ blockIds, from: 0, count: position }) };
  const wanted = request.topLogprobs ?? 0;
  const { newKv, ...candidates } = await model.forward({
    sequenceId: request.requestId,
    tokens,
    position,
    topLogprobs: Math.min(Math.max(sampler.candidates, wanted), model.config.vocabSize),
    ...(past === undefined ? {} : { past }),
  });
  record.modelHasPast = true;
  const { blockSize } = pool.config;
  // Before the layers: from the moment that one is reported, a peer may be sent its blocks.
  if (position < promptLength)
    await pool.zeroTail(blockIds.slice(0, blocksFor(promptLength, blockSize)), promptLength);
  await keep(record, { startedMs, position, tokens: tokens.length }, newKv, options);
  record.numComputedTokens = position + tokens.length;
  if (position < promptLength) cachePrompt(record, promptLength, { blocks, blockSize });
  const token = sampler.choose(candidates);
  const made: EngineToken = {
    token,
    logprob: candidates.topLogprobs[candidates.topTokens.indexOf(token)] ?? Number.NEGATIVE_INFINITY,
    top: Array.from(candidates.topTokens.subarray(0, wanted), (id, i) => ({
      token: id,
      logprob: candidates.topLogprobs[i] ?? Number.NEGATIVE_INFINITY,
    })),
  };
  record.output.push(made);
  return made;
}

/** The new KV into the pool: layer by layer where somebody wants to know, or where the model takes its time for each. */
async function keep(
  record: RequestRecord,
  { startedMs, position, tokens }: { startedMs: number; position: number; tokens: number },
  newKv: ForwardOutput["newKv"],
  { model, pool, layerInPool }: ForwardOptions,
): Promise<void> {
  const span = { blockIds: record.blockIds, from: position, count: tokens };
  const { layers } = model.config;
  if (typeof newKv !== "function" && layerInPool === undefined && model.layerComputed === undefined) {
    await pool.write(span, newKv);
    return;
  }
  const layerKv = typeof newKv === "function" ? newKv : (layer: number) => layerOf(newKv, layer, layers);
  for (let layer = 0; layer < layers; layer++) {
    await pool.writeLayer(span, layer, layerKv(layer));
    await model.layerComputed?.({ startedMs, tokens, layer });
    layerInPool?.(record, layer, position + tokens);
  }
}

function layerOf(kv: ArrayBuffer, layer: number, layers: number): ArrayBuffer {
  const lengthBytes = kv.byteLength / layers;
  return kv.slice(layer * lengthBytes, (layer + 1) * lengthBytes);
}

function sequenceOf({ request, output }: RequestRecord): number[] {
  return [...request.promptTokens, ...output.map(({ token }) => token)];
}

/** Lets the prefix cache find the full blocks among the first `tokens` tokens of the prompt. */
export function cachePrompt(
  record: RequestRecord,
  tokens: number,
  { blocks, blockSize }: { blocks: BlockPool; blockSize: number },
): void {
  if (record.uncacheable) return;
  record.hashes.slice(0, Math.floor(tokens / blockSize)).forEach((hash, index) => {
    const id = record.blockIds[index];
    if (id !== undefined) blocks.cache(id, hash);
  });
}

/** Lets the prefix cache find the full blocks of prompt and output, for a next turn that begins with both. */
export function cacheOutput(
  record: RequestRecord,
  { blocks, blockSize }: { blocks: BlockPool; blockSize: number },
): void {
  if (record.uncacheable) return;
  const tokens = sequenceOf(record).slice(0, record.numComputedTokens);
  blockHashes(tokens, blockSize).forEach((hash, index) => {
    const id = record.blockIds[index];
    if (id !== undefined) blocks.cache(id, hash);
  });
}

/** Why the output ends here, if it does. */
export function stopReason(
  record: RequestRecord,
  eosTokenIds: readonly number[],
): "stopped" | "length" | undefined {
  const { request, output } = record;
  const last = output.at(-1)?.token;
  if (last === undefined) return undefined;
  if (request.stopTokenIds?.includes(last) === true) return "stopped";
  if (request.ignoreEos !== true && eosTokenIds.includes(last)) return "stopped";
  return output.length >= request.maxTokens ? "length" : undefined;
}
