// An engine without a model, for the examples beside it: one rank, two layers, 32 blocks.
// `two-engines.mjs` has the same in one file.
import { setTimeout as sleep } from "node:timers/promises";
import { cpuPlatform } from "@kv/connector";

const BLOCK_BYTES = 2 * 16 * 4 * 8 * 4; // K and V of 16 tokens; a token has 4 heads of 8 float32
const layerNames = ["layers.0", "layers.1"];
/** @type {import("@kv/interface").KvCacheConfig} */
const cache = {
  groups: [{ kind: "full", layerNames }],
  blockSize: 16,
  physicalBlocksPerLogical: 1,
  numKvHeads: 4,
  headSize: 8,
  numHiddenLayers: 2,
  dtype: "torch.float32",
  cacheDtype: "auto",
  layout: "LBHNC",
  attentionBackend: "MINE",
};
const vllm = {
  vllmVersion: "0.33.0",
  connectorVersion: 15,
  isHmaEnabled: false,
  speculativeConfig: null,
};

/**
 * Starts an engine with a connector, such as `pullConnector`. `ambient`: its metrics and log, by
 * default none.
 */
export async function startEngine({
  engineId,
  connector,
  config,
  transport,
  sideChannel,
  ...ambient
}) {
  const engine = { engineId, tpSize: 1, ppSize: 1, dpRank: 0, model: { model: "m", ...vllm } };
  const both = { config, engine, sideChannel, ...ambient };
  const scheduler = await connector.createScheduler({ ...both, cache });
  const rank = { tpRank: 0, ppRank: 0, transport, platform: cpuPlatform() };
  const worker = await connector.createWorker({ ...both, ...rank });
  const regions = layerNames.map((name) => {
    const memory = transport.allocate(32 * BLOCK_BYTES);
    const sizes = { blockLengthBytes: BLOCK_BYTES, blockStrideBytes: BLOCK_BYTES, numBlocks: 32 };
    return { name, memory, memoryType: memory.memoryType, offsetBytes: 0, groupId: 0, ...sizes };
  });
  await worker.registerKvCaches({ config: cache, regions });
  await scheduler.setHandshakeMetadata([await worker.handshakeMetadata()]);
  /**
   * Makes steps until the worker reports the request in one of its lists, and the connector has no
   * work left.
   */
  async function stepUntil(list, requestId) {
    for (let isOver = false; !isOver || scheduler.hasPendingWork(); await sleep(1)) {
      worker.startLoad(scheduler.buildStepMetadata());
      const output = worker.collectFinished();
      scheduler.applyWorkerOutput(output);
      for (const { code, message } of output.failedReceiving)
        throw new Error(`${message} [${code}]`);
      isOver ||= output[list].includes(requestId);
    }
  }
  return {
    blocks: (ids) =>
      regions.flatMap(({ memory }) => ids.map((id) => memory.view(id * BLOCK_BYTES, BLOCK_BYTES))),
    /** Computes a prompt into blocks. Returns what a proxy hands to D. */
    prefill(prompt, blockIds) {
      const request = { ...prompt, kvTransferParams: { do_remote_decode: true } };
      scheduler.afterAllocation(request, [blockIds], 0);
      for (const [n, block] of this.blocks(blockIds).entries()) block.fill(n + 1);
      return scheduler.requestFinished(request, [blockIds], "length").kvTransferParams;
    },
    /** Resolves when P may free the prompt's blocks. */
    sent: (requestId) => stepUntil("finishedSending", requestId),
    /** Gets the KV of a prompt from P into blocks. */
    async receive(request, blockIds) {
      scheduler.afterAllocation(request, [blockIds], scheduler.matchedTokens(request, 0).tokens);
      await stepUntil("finishedReceiving", request.requestId);
    },
    async close() {
      for (const part of [worker, scheduler, transport, sideChannel]) await part.close();
    },
  };
}
