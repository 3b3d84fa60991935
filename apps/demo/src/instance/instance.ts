import { memoryMetrics, readTransferConfig } from "@kv/connector";
import {
  type Ambient,
  ambient,
  type ConnectorModule,
  type EngineIdentity,
  type KvTransferConfig,
  type SideChannel,
  type Transport,
  type WorkerConnector,
} from "@kv/interface";
import { BlockPool } from "../engine/cache/block-pool.js";
import { DIGEST_TOKENS } from "../engine/cache/kv-layout.js";
import { KvPool } from "../engine/cache/kv-pool.js";
import { Engine } from "../engine/engine.js";
import { InstanceServer } from "../http/server.js";
import { loadModel } from "../model/model.js";
import { simulatedModel } from "../model/simulated-model.js";
import { loadTokenizer } from "../model/tokenizer/tokenizer.js";
import { closers } from "./closers.js";
import type { InstanceConfig } from "./instance-config.js";
import { choosePlatform } from "./instance-platform.js";
import { createKvJournal } from "./kv-journal.js";
import { observeKv } from "./observe-kv.js";
import { meterTransfers } from "./transfer-meter.js";

export interface InstanceSurroundings extends Partial<Omit<Ambient, "metrics">> {
  /** The instance's own: it is closed with it. */
  readonly transport: Transport;
  readonly sideChannel: SideChannel;
  readonly resolveConnector: (config: KvTransferConfig) => Promise<ConnectorModule>;
}

/** A prefill or decode server: model, paged cache, connector with a worker per rank, engine, HTTP. */
export interface Instance {
  readonly config: InstanceConfig;
  readonly url: string;
  readonly port: number;
  /** Of the agents, the first backend. */
  readonly backend: string;
  status(): object;
  /** Takes no more requests, waits for those at work and for blocks that peers are to read, `graceMs` at most, then closes. */
  drain(): Promise<void>;
  /** Aborts what is at work and closes everything. */
  close(): Promise<void>;
}

export async function startInstance(config: InstanceConfig, around: InstanceSurroundings): Promise<Instance> {
  const metrics = memoryMetrics({ labels: { engine: "0" } });
  const surroundings = ambient({ ...around, metrics });
  const { clock, random, log } = surroundings;
  const opened = closers(log);
  opened.add("side channel", () => around.sideChannel.close());
  opened.add("transport", () => around.transport.close());
  let pool: KvPool | undefined;
  try {
    const transferConfig = readTransferConfig(config.kvTransferConfig, {
      log,
      env: {
        ...process.env,
        VLLM_NIXL_SIDE_CHANNEL_HOST: config.sideChannelHost,
        VLLM_NIXL_SIDE_CHANNEL_PORT: String(config.sideChannelPort),
      },
    });
    const accelerator = choosePlatform(config, await around.resolveConnector(transferConfig), surroundings);
    const { module } = accelerator;
    opened.add("device", () => accelerator.close());
    const loaded = await loadModel({
      intraOpThreads: config.intraOpThreads,
      ...(config.model === undefined ? {} : { directory: config.model }),
      ...(config.tinyKvHeads === undefined ? {} : { tinyKvHeads: config.tinyKvHeads }),
    });
    opened.add("model", () => loaded.close());
    const { directory, name, vocabSize } = loaded.config;
    const model =
      config.simulate === undefined ? loaded : simulatedModel({ ...config.simulate, clock, vocabSize });
    const { layers, kvHeads, headDim } = model.config;
    const maxModelLen = accelerator.platform.maxModelLen({
      max_position_embeddings: model.config.maxModelLen,
    });
    const tokenizer = await loadTokenizer({ directory, vocabSize });

    const meter = meterTransfers(around.transport, {
      clock,
      blockAt: (address) => accelerator.stagingBlockAt(address) ?? pool?.blockAt(address),
    });
    const kv = new KvPool({
      transport: meter.transport,
      geometry: { layers, kvHeads, headDim },
      numBlocks: config.numBlocks,
      blockSize: config.blockSize,
      tp: config.tp,
      attentionBackend: config.attentionBackend,
      ...(accelerator.openCaches === undefined ? {} : { openCaches: accelerator.openCaches }),
    });
    pool = kv;
    opened.add("KV pool", async () => kv.close());

    const modelName = config.servedModelName ?? name;
    const engineId = transferConfig.engineId ?? random.uuid();
    const engine: EngineIdentity = {
      engineId,
      tpSize: config.tp,
      ppSize: 1,
      dpRank: 0,
      model: {
        model: config.compat.model ?? modelName,
        vllmVersion: config.compat.vllmVersion,
        connectorVersion: config.compat.connectorVersion,
        isHmaEnabled: config.compat.isHmaEnabled,
        speculativeConfig: null,
        ...(config.compat.attentionBackend === undefined
          ? {}
          : { hashedAttentionBackend: config.compat.attentionBackend }),
      },
    };
    const shared = { ...surroundings, config: transferConfig, engine, sideChannel: around.sideChannel };
    const workers: WorkerConnector[] = [];
    for (const [tpRank, caches] of kv.caches.entries()) {
      const worker = await module.createWorker({
        ...shared,
        tpRank,
        ppRank: 0,
        transport: meter.transport,
        platform: accelerator.platform,
      });
      opened.add(`worker ${tpRank}`, () => worker.close());
      await worker.registerKvCaches(caches);
      workers.push(worker);
    }
    const scheduler = await module.createScheduler({ ...shared, cache: kv.config });
    opened.add("scheduler", () => scheduler.close());
    await scheduler.setHandshakeMetadata(
      await Promise.all(workers.map((worker) => worker.handshakeMetadata())),
    );

    const journal = createKvJournal();
    const toZero = new Map<string, number>();
    const blocks = new BlockPool({ numBlocks: config.numBlocks, fragmented: config.fragmented });
    const core = new Engine({
      ...surroundings,
      model,
      pool: kv,
      blocks,
      connector: { scheduler, workers },
      hooks: observeKv({
        pool: kv,
        journal,
        meter,
        clock,
        digests: config.digests,
        toZero,
        takeCopies: accelerator.takeCopies,
      }),
      maxNumSeqs: accelerator.maxNumSeqs,
      reportLayers: transferConfig.extra.push_layerwise === true,
      prefixCaching: accelerator.prefixCaching,
    });

    let ready = true;
    const backend = meter.backends()[0] ?? "none";
    const status = () => ({
      role: config.role,
      name: config.name ?? null,
      engine_id: engineId,
      model: modelName,
      connector: module.name,
      transport: around.transport.name,
      platform: accelerator.platform.deviceType,
      backend,
      tp: config.tp,
      block_size: config.blockSize,
      num_blocks: config.numBlocks,
      free_blocks: blocks.free,
      ready,
      outstanding: core.outstanding(),
      workers: workers.map((worker) => worker.outstanding()),
    });
    const server = new InstanceServer(
      {
        engine: core,
        tokenizer,
        modelNames: [modelName, directory],
        maxModelLen,
        maxOutputTokens: blocks.capacity * config.blockSize,
        debug: config.debug,
        zeroBlockOf: (requestId, block) => void toZero.set(requestId, block),
        ready: () => ready,
        status,
        metrics: metrics.render,
        kvTransfers: () => ({ digest_tokens: DIGEST_TOKENS, records: journal.records }),
      },
      surroundings,
    );
    opened.add("HTTP server", () => server.close());
    // Before the server: what it aborts is answered yet.
    opened.add("engine", () => core.close());
    const { url, port } = await server.listen({ host: config.host, port: config.port });
    log.info("instance-ready", {
      role: config.role,
      url,
      engineId,
      backend,
      tp: config.tp,
      blockSize: config.blockSize,
    });

    return {
      config,
      url,
      port,
      backend,
      status,
      async drain() {
        ready = false;
        log.info("instance-draining", { role: config.role, ...core.outstanding() });
        await within(core.idle(), config.graceMs, clock);
        await opened.close();
      },
      close() {
        ready = false;
        return opened.close();
      },
    };
  } catch (error) {
    await opened.close();
    throw error;
  }
}

/** Waits for `work`, but not longer than `timeoutMs`. */
async function within(work: Promise<void>, timeoutMs: number, clock: Ambient["clock"]): Promise<void> {
  let timer: { cancel(): void } | undefined;
  const patience = new Promise<void>((resolve) => {
    timer = clock.setTimer(resolve, timeoutMs);
  });
  await Promise.race([work, patience]);
  timer?.cancel();
}
