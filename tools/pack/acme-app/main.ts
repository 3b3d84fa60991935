import {
  cpuPlatform,
  memoryMetrics,
  readTransferConfig,
  registerConnector,
  resolveConnector,
} from "@kv/connector";
import {
  type ConnectorRequest,
  type KvCacheConfig,
  type KvCaches,
  KvError,
  type SchedulerConnector,
  type WorkerConnector,
} from "@kv/interface";
import {
  type MemoryNetwork,
  memoryNetwork,
  memorySideChannel,
  memoryTransport,
} from "@kv/transport-memory";

// An application that resolves its connector from the configuration: two engines without a model,
// and the KV of one prompt.

const acme = "acme-kv-connector";
const byName = process.argv[2] === "by-name";
if (byName) registerConnector("AcmeConnector", () => import(acme));
const settings = {
  kv_connector: "AcmeConnector",
  kv_role: "kv_both",
  ...(byName ? {} : { kv_connector_module_path: acme }),
};

const NUM_BLOCKS = 32;
const BLOCK_BYTES = 4096;
const PROMPT_TOKENS = 48;
const PROMPT = Array.from({ length: PROMPT_TOKENS }, (_, token) => token);
const cache: KvCacheConfig = {
  groups: [{ kind: "full", layerNames: ["layers.0", "layers.1"] }],
  blockSize: 16,
  physicalBlocksPerLogical: 1,
  numKvHeads: 4,
  headSize: 8,
  numHiddenLayers: 2,
  dtype: "torch.float32",
  cacheDtype: "auto",
  layout: "LBHNC",
  attentionBackend: "ACME",
};
const model = {
  model: "acme",
  vllmVersion: "0.33.0",
  connectorVersion: 15,
  isHmaEnabled: false,
  speculativeConfig: null,
};

interface Engine {
  readonly scheduler: SchedulerConnector;
  readonly worker: WorkerConnector;
  readonly metrics: ReturnType<typeof memoryMetrics>;
  block(layer: number, blockId: number): Uint8Array;
  /**
   * One engine step: passes the scheduler's metadata to the worker, and the worker's output to the
   * scheduler.
   */
  step(): { received: readonly string[]; sent: readonly string[] };
  progress(): Promise<void>;
  close(): Promise<void>;
}

async function startEngine(name: string, network: MemoryNetwork): Promise<Engine> {
  const transport = memoryTransport({ network, host: name });
  const sideChannel = memorySideChannel({ network, host: name });
  const metrics = memoryMetrics();
  const config = { ...readTransferConfig(settings), sideChannelHost: name };
  const connector = await resolveConnector(config);
  const engine = { engineId: name, tpSize: 1, ppSize: 1, dpRank: 0, model };
  const scheduler = await connector.createScheduler({
    config,
    engine,
    cache,
    sideChannel,
    metrics,
  });
  const worker = await connector.createWorker({
    config,
    engine,
    tpRank: 0,
    ppRank: 0,
    transport,
    platform: cpuPlatform(),
    sideChannel,
    metrics,
  });
  const layers = ["layers.0", "layers.1"].map((layer) => ({
    layer,
    memory: transport.allocate(NUM_BLOCKS * BLOCK_BYTES),
  }));
  const caches: KvCaches = {
    config: cache,
    regions: layers.map(({ layer, memory }) => ({
      name: layer,
      memory,
      offsetBytes: 0,
      numBlocks: NUM_BLOCKS,
      blockLengthBytes: BLOCK_BYTES,
      blockStrideBytes: BLOCK_BYTES,
      groupId: 0,
      memoryType: "DRAM",
    })),
  };
  await worker.registerKvCaches(caches);
  await scheduler.setHandshakeMetadata([await worker.handshakeMetadata()]);
  let heard = () => {};
  let next = new Promise<void>((resolve) => {
    heard = resolve;
  });
  worker.onProgress(() => heard());
  return {
    scheduler,
    worker,
    metrics,
    block(layer, blockId) {
      const bytes = layers[layer]?.memory.bytes ?? new Uint8Array();
      return bytes.subarray(blockId * BLOCK_BYTES, (blockId + 1) * BLOCK_BYTES);
    },
    step() {
      worker.startLoad(scheduler.buildStepMetadata());
      const output = worker.collectFinished();
      scheduler.applyWorkerOutput(output);
      const [failed] = output.failedReceiving;
      if (failed !== undefined) throw new KvError(failed.code, failed.message);
      return { received: output.finishedReceiving, sent: output.finishedSending };
    },
    async progress() {
      await next;
      next = new Promise((resolve) => {
        heard = resolve;
      });
    },
    async close() {
      await worker.close();
      await scheduler.close();
      await transport.close();
      await sideChannel.close();
    },
  };
}

const network = memoryNetwork();
const prefill = await startEngine("p", network);
const decode = await startEngine("d", network);
const prefillBlocks = [5, 9, 2];
const decodeBlocks = [30, 1, 17];

// P has computed the prompt and keeps its blocks until D has read them.
const asked: ConnectorRequest = {
  requestId: "at-p",
  numPromptTokens: PROMPT_TOKENS,
  promptTokenIds: PROMPT,
  kvTransferParams: { do_remote_decode: true },
};
prefill.scheduler.afterAllocation(asked, [prefillBlocks], 0);
prefill.step();
for (const [order, id] of prefillBlocks.entries()) {
  for (const layer of [0, 1]) prefill.block(layer, id).fill(1 + layer * 100 + order);
}
const finished = prefill.scheduler.requestFinished(asked, [prefillBlocks], "length");
prefill.step();

// D gets their location and reads them.
const wanted: ConnectorRequest = {
  requestId: "at-d",
  numPromptTokens: PROMPT_TOKENS,
  promptTokenIds: PROMPT,
  kvTransferParams: finished.kvTransferParams,
};
const { tokens } = decode.scheduler.matchedTokens(wanted, 0);
decode.scheduler.afterAllocation(wanted, [decodeBlocks], tokens);
while (!decode.step().received.includes("at-d")) await decode.progress();
// The connector has work left for D's next step: it notifies P that nobody reads the blocks any
// more.
while (decode.scheduler.hasPendingWork()) decode.step();
while (!prefill.step().sent.includes("at-p")) await prefill.progress();

const differing = decodeBlocks.flatMap((id, order) =>
  [0, 1].filter((layer) => {
    const source = prefill.block(layer, prefillBlocks[order] ?? -1);
    return source.length !== BLOCK_BYTES || Buffer.compare(source, decode.block(layer, id)) !== 0;
  }),
);
console.log(
  JSON.stringify({
    connector: [decode.scheduler.name, decode.worker.name],
    keptBlocks: finished.keepBlocks,
    tokens,
    differing: differing.length,
    first: decodeBlocks.map((id) => [0, 1].map((layer) => decode.block(layer, id)[0])),
    received: decode.metrics.total("acme_kv_requests_received"),
    transfers: decode.metrics.total("vllm:nixl_xfer_time_seconds"),
    bytes: /bytes_transferred_sum\S* (\S+)/.exec(decode.metrics.render())?.[1],
  }),
);
await Promise.all([prefill.close(), decode.close()]);
