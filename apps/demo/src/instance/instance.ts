import { memoryMetrics } from "@kv/connector";
import { type Ambient, ambient, type SideChannel, type Transport } from "@kv/interface";
import { DIGEST_TOKENS } from "../engine/cache/kv-layout.js";
import type { Engine } from "../engine/engine.js";
import type { ServedInstance } from "../http/generation.js";
import { InstanceServer } from "../http/server.js";
import { loadModel } from "../model/model.js";
import { simulatedModel } from "../model/simulated-model.js";
import { loadTokenizer, type Tokenizer } from "../model/tokenizer/tokenizer.js";
import { CloseStack } from "./close-stack.js";
import { type EngineRank, type SideChannelAddress, startEngineRank } from "./engine-rank.js";
import { type InstanceConfig, transferConfigOf } from "./instance-config.js";
import { KvJournal } from "./kv-journal.js";

export interface InstanceOptions extends Partial<Omit<Ambient, "metrics">> {
  readonly transport: Transport;
  /** Belongs to the instance, which closes it. */
  readonly sideChannel: SideChannel;
}

interface Parts {
  readonly config: InstanceConfig;
  readonly ambient: Ambient;
  readonly closers: CloseStack;
  readonly ranks: readonly EngineRank[];
  readonly tokenizer: Tokenizer;
  readonly journal: KvJournal;
  readonly blocksToZero: Map<string, number>;
  readonly model: {
    readonly name: string;
    readonly directory: string;
    readonly maxModelLen: number;
  };
  readonly transportName: string;
  readonly metrics: () => string;
}

/**
 * A prefill or decode server: model, paged cache, an engine with a connector for each data-parallel
 * rank, HTTP.
 */
export class Instance implements ServedInstance {
  url = "";
  port = 0;
  readonly engines: readonly Engine[];
  readonly engineIds: readonly string[];
  /**
   * Where the first data-parallel rank answers handshakes; null for a connector without a side
   * channel.
   */
  readonly sideChannel: SideChannelAddress | null;
  readonly tokenizer: Tokenizer;
  readonly modelNames: readonly string[];
  readonly maxModelLen: number;
  readonly maxOutputTokens: number;
  readonly debug: boolean;
  readonly #parts: Parts;
  readonly #server: InstanceServer;
  #isReady = true;

  private constructor(parts: Parts) {
    const { config, ranks, model, ambient } = parts;
    this.engines = ranks.map(({ engine }) => engine);
    this.engineIds = ranks.map(({ engineId }) => engineId);
    this.sideChannel = ranks[0]?.sideChannel ?? null;
    this.tokenizer = parts.tokenizer;
    this.modelNames = [model.name, model.directory];
    this.maxModelLen = model.maxModelLen;
    this.maxOutputTokens = (config.numBlocks - 1) * config.blockSize;
    this.debug = config.debug;
    this.#parts = parts;
    const { httpLimits: limits, exposeErrors } = config;
    this.#server = new InstanceServer(this, { ...ambient, limits, exposeErrors });
  }

  static async open(parts: Parts): Promise<Instance> {
    const { config, closers, ranks, ambient } = parts;
    const instance = new Instance(parts);
    closers.add("HTTP server", () => instance.#server.close());
    // The engines close before the server, so that clients get the errors of aborted requests.
    for (const { engine, dpRank } of ranks) closers.add(`engine ${dpRank}`, () => engine.close());
    Object.assign(
      instance,
      await instance.#server.listen({ host: config.host, port: config.port }),
    );
    ambient.log.info("instance-ready", {
      role: config.role,
      url: instance.url,
      engineIds: instance.engineIds,
      backend: instance.backend,
      tp: config.tp,
      blockSize: config.blockSize,
    });
    return instance;
  }

  get backend(): string {
    return this.#parts.ranks[0]?.backend() ?? "none";
  }

  get settings(): object {
    const { config, model, ranks } = this.#parts;
    const { sideChannelHost, sideChannelPort } = ranks[0]?.transferConfig ?? {};
    const { maxNumSeqs, prefixCaching, maxConcurrentBatches } = ranks[0]?.platform ?? {};
    return {
      ...config,
      port: this.port,
      sideChannelHost,
      sideChannelPort,
      model: model.directory,
      maxNumSeqs,
      prefixCaching,
      maxConcurrentBatches,
      maxModelLen: model.maxModelLen,
    };
  }

  zeroBlockOf(requestId: string, block: number): void {
    this.#parts.blocksToZero.set(requestId, block);
  }

  /** False as well while an engine sleeps, so that a proxy sends its requests to others. */
  ready(): boolean {
    return this.#isReady && !this.engines.some(({ sleepMode }) => sleepMode.isOn);
  }

  status(): object {
    const { config, ranks, transportName, model } = this.#parts;
    const [first] = ranks;
    return {
      role: config.role,
      name: config.name ?? null,
      engine_id: first?.engineId ?? null,
      engine_ids: this.engineIds,
      model: model.name,
      connector: first?.platform.module.name ?? null,
      transport: transportName,
      platform: first?.platform.platform.deviceType ?? null,
      backend: this.backend,
      tp: config.tp,
      dp: config.dp,
      block_size: config.blockSize,
      num_blocks: config.numBlocks,
      free_blocks: ranks.reduce((sum, { blocks }) => sum + blocks.free, 0),
      ready: this.ready(),
      outstanding: this.#outstanding(),
      workers: ranks.flatMap(({ workers }) => workers.map((worker) => worker.outstanding())),
    };
  }

  #outstanding(): Record<string, number> {
    const sums: Record<string, number> = {};
    for (const { engine } of this.#parts.ranks) {
      for (const [name, count] of Object.entries(engine.outstanding()))
        sums[name] = (sums[name] ?? 0) + count;
    }
    return sums;
  }

  metrics(): string {
    return `${this.#parts.metrics()}${this.#cacheMetrics()}`;
  }

  /** vLLM's metrics of the cache: `kv-peer` computes the used blocks from them. */
  #cacheMetrics(): string {
    const { config, ranks, model } = this.#parts;
    const { blockSize, numBlocks } = config;
    const gauge = (name: string, help: string, sample: (rank: EngineRank) => string) =>
      `# HELP ${name} ${help}\n# TYPE ${name} gauge\n${ranks.map((rank) => `${name}${sample(rank)}\n`).join("")}`;
    const labels = ({ dpRank }: EngineRank) =>
      `{engine="${dpRank}",model_name=${JSON.stringify(model.name)}}`;
    return [
      gauge(
        "vllm:cache_config_info",
        "Information of the cache.",
        ({ dpRank }) =>
          `{block_size="${blockSize}",engine="${dpRank}",num_gpu_blocks="${numBlocks}"} 1.0`,
      ),
      gauge(
        "vllm:kv_cache_usage_perc",
        "Share of the blocks in use; 1 is all of them.",
        (rank) => `${labels(rank)} ${rank.blocks.held / (numBlocks - 1)}`,
      ),
      gauge(
        "vllm:num_requests_running",
        "Requests in execution.",
        (rank) => `${labels(rank)} ${rank.engine.requestCounts().running}`,
      ),
      gauge("vllm:num_requests_waiting", "Requests that wait.", (rank) => {
        const { waiting, remote } = rank.engine.requestCounts();
        return `${labels(rank)} ${waiting + remote}`;
      }),
    ].join("");
  }

  kvTransfers(): object {
    return { digest_tokens: DIGEST_TOKENS, records: this.#parts.journal.records };
  }

  /**
   * Refuses new requests, waits up to `graceMs` for running requests and for blocks that peers are
   * to read, then closes.
   */
  async drain(): Promise<void> {
    const { config, ambient } = this.#parts;
    this.#isReady = false;
    ambient.log.info("instance-draining", { role: config.role, ...this.#outstanding() });
    const idle = Promise.all(this.engines.map((engine) => engine.idle()));
    await waitAtMost(idle, config.graceMs, ambient.clock);
    await this.close();
  }

  close(): Promise<void> {
    this.#isReady = false;
    return this.#parts.closers.close();
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }
}

/**
 * Starts an instance and its HTTP server. Errors: `KV_CONFIG_INVALID`, `KV_PLATFORM_UNSUPPORTED`,
 * `KV_MODEL_UNSUPPORTED`; those of the connector, the transport and the side channel. What was
 * opened is closed then.
 */
export async function startInstance(
  config: InstanceConfig,
  options: InstanceOptions,
): Promise<Instance> {
  const { transport, sideChannel } = options;
  const metrics = memoryMetrics();
  const environment = ambient({ ...options, metrics });
  const { clock, random, log } = environment;
  const closers = new CloseStack(log);
  closers.add("side channel", () => sideChannel.close());
  closers.add("transport", () => transport.close());
  try {
    const transferConfig = transferConfigOf(config, { env: process.env, log });
    const loaded = await loadModel({
      intraOpThreads: config.intraOpThreads,
      directory: config.model,
      tinyKvHeads: config.tinyKvHeads,
    });
    closers.add("model", () => loaded.close());
    const { directory, vocabSize } = loaded.config;
    const model =
      config.simulate === undefined
        ? loaded
        : simulatedModel({ ...config.simulate, clock, vocabSize });
    const name = config.servedModelName ?? loaded.config.name;
    const journal = new KvJournal();
    const blocksToZero = new Map<string, number>();
    const engineId = transferConfig.engineId ?? random.uuid();
    const ranks: EngineRank[] = [];
    for (let dpRank = 0; dpRank < config.dp; dpRank++) {
      const rank = {
        config,
        transferConfig,
        transport,
        sideChannel,
        model,
        closers,
        journal,
        blocksToZero,
        dpRank,
        servedName: name,
        // As vLLM names the engines of data-parallel ranks.
        engineId: config.dp === 1 ? engineId : `${engineId}_dp${dpRank}`,
        ambient: environment,
      };
      ranks.push(await startEngineRank(rank));
    }
    return await Instance.open({
      config,
      ambient: environment,
      closers,
      ranks,
      tokenizer: await loadTokenizer({ directory, vocabSize }),
      journal,
      blocksToZero,
      model: { name, directory, maxModelLen: ranks[0]?.maxModelLen ?? 0 },
      transportName: transport.name,
      metrics: metrics.render,
    });
  } catch (error) {
    await closers.close();
    throw error;
  }
}

async function waitAtMost(
  work: Promise<unknown>,
  timeoutMs: number,
  clock: Ambient["clock"],
): Promise<void> {
  let timer: { cancel(): void } | undefined;
  const timeout = new Promise<void>((resolve) => {
    timer = clock.setTimer(resolve, timeoutMs);
  });
  await Promise.race([work, timeout]);
  timer?.cancel();
}
