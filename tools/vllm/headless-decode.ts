import { cpuPlatform, createWorkerOutputAggregator, readTransferConfig, zmqSideChannel } from "@kv/connector";
import {
  type ConnectorRequest,
  type EngineIdentity,
  type FailedReceive,
  type KvCacheConfig,
  type KvTransferParams,
  type Log,
  type Memory,
  silentLog,
  type WorkerConnector,
} from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { pullConnector } from "@kv/pull";
import { FACTORS, TINY } from "./tiny-peer.js";

export interface HeadlessDecodeOptions {
  readonly tp?: number;
  /** Instead of vLLM's on the CPU, as it enters the compatibility hash. */
  readonly dtype?: string;
  readonly log?: Log;
}

/** A decode engine without a model: it asks for blocks as an engine would, and lets a test look at them. */
export interface HeadlessDecode {
  /**
   * Takes a request in, in blocks of the test's choice, the first of which hold `numComputedTokens` already. Resolves when every rank has
   * its part, with the failure if it has not.
   */
  receive(
    request: ConnectorRequest,
    blockIds: readonly number[],
    options?: { readonly numComputedTokens?: number },
  ): Promise<{ readonly failure: FailedReceive | undefined }>;
  /** The request is queued and then given up before it gets blocks. */
  giveUpQueued(request: ConnectorRequest): void;
  /** The engine is through with a request whose KV has arrived. */
  finish(request: ConnectorRequest, blockIds: readonly number[]): void;
  /** Bytes of a block of a layer on one rank. */
  block(tpRank: number, layer: number, blockId: number): Uint8Array;
  outstanding(): Readonly<Record<string, number>>;
  close(): Promise<void>;
}

const NUM_BLOCKS = 16;
/** What memory holds that nothing was written to. */
export const UNTOUCHED = 0xa5;

export function requestOf(
  requestId: string,
  numPromptTokens: number,
  kvTransferParams: KvTransferParams | null | undefined,
): ConnectorRequest {
  return { requestId, numPromptTokens, kvTransferParams: kvTransferParams ?? undefined };
}

export async function openHeadlessDecode(options: HeadlessDecodeOptions = {}): Promise<HeadlessDecode> {
  const { tp = 1, dtype = FACTORS.dtype, log = silentLog } = options;
  const transport = nixlTransport({ log });
  const sideChannel = zmqSideChannel({ log });
  const config = readTransferConfig(
    { kv_connector: "NixlConnector", kv_role: "kv_consumer", kv_buffer_device: "cpu" },
    { env: { VLLM_NIXL_SIDE_CHANNEL_HOST: "127.0.0.1", VLLM_NIXL_SIDE_CHANNEL_PORT: "0" }, log },
  );
  const layers = Array.from({ length: TINY.layers }, (_, layer) => TINY.layerName(layer));
  const cache: KvCacheConfig = {
    groups: [{ kind: "full", layerNames: layers }],
    blockSize: TINY.blockSize,
    physicalBlocksPerLogical: 1,
    numKvHeads: FACTORS.num_kv_heads,
    headSize: FACTORS.head_size,
    numHiddenLayers: FACTORS.num_hidden_layers,
    dtype,
    cacheDtype: FACTORS.cache_dtype,
    layout: "LBHNC",
    attentionBackend: FACTORS.attn_backend_name,
  };
  const engine: EngineIdentity = {
    engineId: `headless-decode-${process.pid}-tp${tp}`,
    tpSize: tp,
    ppSize: 1,
    dpRank: 0,
    model: {
      model: FACTORS.model,
      vllmVersion: FACTORS.vllm_version,
      connectorVersion: FACTORS.nixl_connector_version,
      isHmaEnabled: FACTORS.is_hma_enabled,
      speculativeConfig: FACTORS.speculative_config,
    },
  };
  const blockLengthBytes = (TINY.kvHeads / tp) * TINY.blockSize * TINY.contentBytes;
  const layerLengthBytes = NUM_BLOCKS * blockLengthBytes;
  const shared = { config, engine, sideChannel, log };

  const memories: Memory[] = [];
  const workers: WorkerConnector[] = [];
  for (let tpRank = 0; tpRank < tp; tpRank++) {
    const memory = transport.allocate(TINY.layers * layerLengthBytes);
    memory.bytes.fill(UNTOUCHED);
    memories.push(memory);
    const worker = await pullConnector.createWorker({
      ...shared,
      tpRank,
      ppRank: 0,
      transport,
      platform: cpuPlatform(),
    });
    await worker.registerKvCaches({
      config: cache,
      regions: layers.map((name, layer) => ({
        name,
        memory,
        offsetBytes: layer * layerLengthBytes,
        numBlocks: NUM_BLOCKS,
        blockLengthBytes,
        blockStrideBytes: blockLengthBytes,
        groupId: 0,
        memoryType: memory.memoryType,
      })),
    });
    workers.push(worker);
  }
  const scheduler = await pullConnector.createScheduler({ ...shared, cache });
  await scheduler.setHandshakeMetadata(
    await Promise.all(workers.map((worker) => worker.handshakeMetadata())),
  );

  const aggregator = createWorkerOutputAggregator({ workers: tp });
  const waiting = new Map<string, (failure: FailedReceive | undefined) => void>();

  function step(): void {
    const metadata = scheduler.buildStepMetadata();
    for (const worker of workers) worker.startLoad(metadata);
  }

  for (const [tpRank, worker] of workers.entries()) {
    worker.onProgress(() => {
      const output = aggregator.add(tpRank, worker.collectFinished());
      scheduler.applyWorkerOutput(output);
      for (const id of output.finishedReceiving) {
        waiting.get(id)?.(output.failedReceiving.find(({ requestId }) => requestId === id));
        waiting.delete(id);
      }
      step();
    });
  }

  return {
    async receive(request, blockIds, { numComputedTokens = 0 } = {}) {
      const { tokens } = scheduler.matchedTokens(request, numComputedTokens);
      const ended = new Promise<FailedReceive | undefined>((resolve) =>
        waiting.set(request.requestId, resolve),
      );
      scheduler.afterAllocation(request, [blockIds], tokens);
      step();
      return { failure: await ended };
    },
    giveUpQueued(request) {
      scheduler.requestQueued?.(request);
      scheduler.requestFinished(request, [[]], "aborted");
      step();
    },
    finish(request, blockIds) {
      scheduler.requestFinished(request, [blockIds], "length");
      step();
    },
    block(tpRank, layer, blockId) {
      const begin = layer * layerLengthBytes + blockId * blockLengthBytes;
      return memories[tpRank]?.bytes.subarray(begin, begin + blockLengthBytes) ?? new Uint8Array();
    },
    outstanding() {
      const all: Record<string, number> = { ...scheduler.outstanding() };
      for (const worker of workers) {
        for (const [name, count] of Object.entries(worker.outstanding()))
          all[name] = (all[name] ?? 0) + count;
      }
      return all;
    },
    async close() {
      await scheduler.close();
      for (const worker of workers) await worker.close();
      await sideChannel.close();
      await transport.close();
      for (const memory of memories) memory.close();
    },
  };
}
