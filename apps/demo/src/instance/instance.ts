import { memoryMetrics, readTransferConfig } from "@kv/connector";
import {
  type Ambient,
  ambient,
  type EngineIdentity,
  type KvTransferConfig,
  type SchedulerConnector,
  type SideChannel,
  type Transport,
  type WorkerConnector,
} from "@kv/interface";
import { BlockPool } from "../engine/cache/block-pool.js";
import { DIGEST_TOKENS } from "../engine/cache/kv-layout.js";
import { KvPool } from "../engine/cache/kv-pool.js";
import { Engine } from "../engine/engine.js";
import type { ServedInstance } from "../http/generation.js";
import { InstanceServer } from "../http/server.js";
import { loadModel, type Model } from "../model/model.js";
import { simulatedModel } from "../model/simulated-model.js";
import { loadTokenizer, type Tokenizer } from "../model/tokenizer/tokenizer.js";
import { CloseStack } from "./close-stack.js";
import { demoConnectors } from "./connectors.js";
import type { InstanceConfig } from "./instance-config.js";
import { choosePlatform, type InstancePlatform } from "./instance-platform.js";
import { createKvJournal, type KvJournal } from "./kv-journal.js";
import { observeKv } from "./observe-kv.js";
import { meterTransfers } from "./transfer-meter.js";

export interface InstanceOptions extends Partial<Omit<Ambient, "metrics">> {
  /** Belongs to the instance, which closes it. */
  readonly transport: Transport;
  /** Belongs to the instance, which closes it. */
  readonly sideChannel: SideChannel;
}

interface Parts {
  readonly config: InstanceConfig;
  readonly ambient: Ambient;
  readonly closers: CloseStack;
  readonly engine: Engine;
  readonly blocks: BlockPool;
  readonly tokenizer: Tokenizer;
  readonly platform: InstancePlatform;
  readonly workers: readonly WorkerConnector[];
  readonly journal: KvJournal;
  readonly blocksToZero: Map<string, number>;
  readonly model: { readonly name: string; readonly directory: string; readonly maxModelLen: number };
  readonly engineId: string;
  readonly transportName: string;
  readonly backend: string;
  readonly metrics: () => string;
}

/** A prefill or decode server: model, paged cache, a connector with a worker per rank, engine, HTTP. */
export class Instance implements ServedInstance {
  readonly #parts: Parts;
  readonly #server: InstanceServer;
  #isReady = true;
  #address = { url: "", port: 0 };

  private constructor(parts: Parts) {
    this.#parts = parts;
    const { httpLimits, exposeErrors } = parts.config;
    this.#server = new InstanceServer(this, { ...parts.ambient, limits: httpLimits, exposeErrors });
  }

  static async open(parts: Parts): Promise<Instance> {
    const { config, closers, engine, engineId, ambient } = parts;
    const instance = new Instance(parts);
    closers.add("HTTP server", () => instance.#server.close());
    // The engine closes before the server, so that clients get the errors of aborted requests.
    closers.add("engine", () => engine.close());
    instance.#address = await instance.#server.listen({ host: config.host, port: config.port });
    ambient.log.info("instance-ready", {
      role: config.role,
      url: instance.url,
      engineId,
      backend: instance.backend,
      tp: config.tp,
      blockSize: config.blockSize,
    });
    return instance;
  }

  get url(): string {
    return this.#address.url;
  }

  get port(): number {
    return this.#address.port;
  }

  /** The first backend of the agents. */
  get backend(): string {
    return this.#parts.backend;
  }

  get engine(): Engine {
    return this.#parts.engine;
  }

  get tokenizer(): Tokenizer {
    return this.#parts.tokenizer;
  }

  get modelNames(): readonly string[] {
    const { name, directory } = this.#parts.model;
    return [name, directory];
  }

  get maxModelLen(): number {
    return this.#parts.model.maxModelLen;
  }

  get maxOutputTokens(): number {
    return this.#parts.blocks.capacity * this.#parts.config.blockSize;
  }

  get debug(): boolean {
    return this.#parts.config.debug;
  }

  zeroBlockOf(requestId: string, block: number): void {
    this.#parts.blocksToZero.set(requestId, block);
  }

  ready(): boolean {
    return this.#isReady;
  }

  /** The body of `/status`. */
  status(): object {
    const { config, engine, engineId, platform, transportName, blocks, workers, model } = this.#parts;
    return {
      role: config.role,
      name: config.name ?? null,
      engine_id: engineId,
      model: model.name,
      connector: platform.module.name,
      transport: transportName,
      platform: platform.platform.deviceType,
      backend: this.backend,
      tp: config.tp,
      block_size: config.blockSize,
      num_blocks: config.numBlocks,
      free_blocks: blocks.free,
      ready: this.#isReady,
      outstanding: engine.outstanding(),
      workers: workers.map((worker) => worker.outstanding()),
    };
  }

  metrics(): string {
    return this.#parts.metrics();
  }

  kvTransfers(): object {
    return { digest_tokens: DIGEST_TOKENS, records: this.#parts.journal.records };
  }

  /** Refuses new requests, waits up to `graceMs` for running requests and for blocks that peers are to read, then closes. */
  async drain(): Promise<void> {
    const { config, engine, ambient } = this.#parts;
    this.#isReady = false;
    ambient.log.info("instance-draining", { role: config.role, ...engine.outstanding() });
    await waitAtMost(engine.idle(), config.graceMs, ambient.clock);
    await this.close();
  }

  /** Aborts all requests and closes everything. */
  close(): Promise<void> {
    this.#isReady = false;
    return this.#parts.closers.close();
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }
}

/**
 * Starts an instance and its HTTP server. Errors: `KV_CONFIG_INVALID`, `KV_PLATFORM_UNSUPPORTED`, `KV_MODEL_UNSUPPORTED`; those of the
 * connector, the transport and the side channel. What was opened is closed then.
 */
export async function startInstance(config: InstanceConfig, options: InstanceOptions): Promise<Instance> {
  const { transport, sideChannel } = options;
  const metrics = memoryMetrics({ labels: { engine: "0" } });
  const environment = ambient({ ...options, metrics });
  const { clock, random, log } = environment;
  const closers = new CloseStack(log);
  closers.add("side channel", () => sideChannel.close());
  closers.add("transport", () => transport.close());
  try {
    const transferConfig = transferConfigOf(config, environment);
    const connector = await demoConnectors().resolve(transferConfig);
    const platform = choosePlatform(config, connector, environment);
    closers.add("device", () => platform.close());
    const loaded = await loadModel({
      intraOpThreads: config.intraOpThreads,
      directory: config.model,
      tinyKvHeads: config.tinyKvHeads,
    });
    closers.add("model", () => loaded.close());
    const { directory, vocabSize } = loaded.config;
    const model =
      config.simulate === undefined ? loaded : simulatedModel({ ...config.simulate, clock, vocabSize });

    let pool: KvPool | undefined;
    const meter = meterTransfers(transport, {
      clock,
      blockAt: (address) => platform.stagingBlockAt(address) ?? pool?.blockAt(address),
    });
    const kv = new KvPool({
      transport: meter.transport,
      geometry: model.config,
      numBlocks: config.numBlocks,
      blockSize: config.blockSize,
      tp: config.tp,
      attentionBackend: config.attentionBackend,
      openCaches: platform.openCaches,
    });
    pool = kv;
    closers.add("KV pool", async () => kv.close());

    const identity = identityOf(config, loaded, transferConfig.engineId ?? random.uuid());
    const { scheduler, workers } = await openConnector(platform, kv, closers, {
      ...environment,
      config: transferConfig,
      engine: identity,
      transport: meter.transport,
      sideChannel,
    });
    const journal = createKvJournal();
    const blocksToZero = new Map<string, number>();
    const blocks = new BlockPool({ numBlocks: config.numBlocks, fragmented: config.fragmented });
    const engine = new Engine({
      ...environment,
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
        blocksToZero,
        takeCopies: platform.takeCopies,
      }),
      maxNumSeqs: platform.maxNumSeqs,
      reportLayers: transferConfig.extra.push_layerwise === true,
      prefixCaching: platform.prefixCaching,
    });
    return await Instance.open({
      config,
      ambient: environment,
      closers,
      engine,
      blocks,
      tokenizer: await loadTokenizer({ directory, vocabSize }),
      platform,
      workers,
      journal,
      blocksToZero,
      model: {
        name: servedName(config, loaded),
        directory,
        maxModelLen: platform.platform.maxModelLen({ max_position_embeddings: model.config.maxModelLen }),
      },
      engineId: identity.engineId,
      transportName: transport.name,
      backend: meter.backends()[0] ?? "none",
      metrics: metrics.render,
    });
  } catch (error) {
    await closers.close();
    throw error;
  }
}

function transferConfigOf(config: InstanceConfig, { log }: Ambient): KvTransferConfig {
  return readTransferConfig(config.kvTransferConfig, {
    log,
    env: {
      ...process.env,
      VLLM_NIXL_SIDE_CHANNEL_HOST: config.sideChannelHost,
      VLLM_NIXL_SIDE_CHANNEL_PORT: String(config.sideChannelPort),
    },
  });
}

function servedName({ servedModelName }: InstanceConfig, { config: { name } }: Model): string {
  return servedModelName ?? name;
}

function identityOf(config: InstanceConfig, model: Model, engineId: string): EngineIdentity {
  const { compat } = config;
  return {
    engineId,
    tpSize: config.tp,
    ppSize: 1,
    dpRank: 0,
    model: {
      model: compat.model ?? servedName(config, model),
      vllmVersion: compat.vllmVersion,
      connectorVersion: compat.connectorVersion,
      isHmaEnabled: compat.isHmaEnabled,
      speculativeConfig: null,
      // The interface takes an absent key only.
      ...(compat.attentionBackend === undefined ? {} : { hashedAttentionBackend: compat.attentionBackend }),
    },
  };
}

/** Opens a worker connector per rank and the scheduler connector, and starts the handshake listener. */
async function openConnector(
  { module, platform }: InstancePlatform,
  pool: KvPool,
  closers: CloseStack,
  options: Ambient & {
    readonly config: KvTransferConfig;
    readonly engine: EngineIdentity;
    readonly transport: Transport;
    readonly sideChannel: SideChannel;
  },
): Promise<{ scheduler: SchedulerConnector; workers: WorkerConnector[] }> {
  const workers: WorkerConnector[] = [];
  for (const [tpRank, caches] of pool.caches.entries()) {
    const worker = await module.createWorker({ ...options, tpRank, ppRank: 0, platform });
    closers.add(`worker ${tpRank}`, () => worker.close());
    await worker.registerKvCaches(caches);
    workers.push(worker);
  }
  const scheduler = await module.createScheduler({ ...options, cache: pool.config });
  closers.add("scheduler", () => scheduler.close());
  await scheduler.setHandshakeMetadata(
    await Promise.all(workers.map((worker) => worker.handshakeMetadata())),
  );
  return { scheduler, workers };
}

async function waitAtMost(work: Promise<void>, timeoutMs: number, clock: Ambient["clock"]): Promise<void> {
  let timer: { cancel(): void } | undefined;
  const timeout = new Promise<void>((resolve) => {
    timer = clock.setTimer(resolve, timeoutMs);
  });
  await Promise.race([work, timeout]);
  timer?.cancel();
}
