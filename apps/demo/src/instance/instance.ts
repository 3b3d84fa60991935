import { memoryMetrics } from "@kv/connector";
import { type Ambient, ambient, type SideChannel, type Transport } from "@kv/interface";
import type { CacheChange } from "../engine/cache/block-pool.js";
import type { CacheTier } from "../engine/cache/cache-tier.js";
import { DIGEST_TOKENS } from "../engine/cache/kv-layout.js";
import type { ServedInstance } from "../http/generation.js";
import { InstanceServer } from "../http/server.js";
import { loadModel } from "../model/model.js";
import { simulatedModel } from "../model/simulated-model.js";
import { loadTokenizer } from "../model/tokenizer/tokenizer.js";
import { CloseStack } from "./close-stack.js";
import { type EngineRank, startEngineRank } from "./engine-rank.js";
import { type InstanceConfig, transferConfigOf } from "./instance-config.js";

/** Transport and side channel belong to the instance, which closes them. */
export interface InstanceOptions extends Partial<Omit<Ambient, "metrics">> {
  readonly transport: Transport;
  readonly sideChannel: SideChannel;
  /** Learns what the prefix caches hold. */
  readonly onCacheChange?: ((change: CacheChange) => void) | undefined;
}

export type Instance = Awaited<ReturnType<typeof startInstance>>;

/**
 * Starts an instance.
 * @throws `KV_CONFIG_INVALID`, `KV_PLATFORM_UNSUPPORTED`, `KV_MODEL_UNSUPPORTED`; those of the
 * connector, the transport and the side channel. What was opened is closed then.
 */
export async function startInstance(config: InstanceConfig, options: InstanceOptions) {
  const { transport, sideChannel } = options;
  const metrics = memoryMetrics();
  const environment = ambient({ ...options, metrics });
  const { clock, log } = environment;
  const closers = new CloseStack(log);
  closers.add("side channel", () => sideChannel.close());
  closers.add("transport", () => transport.close());
  try {
    const transferConfig = transferConfigOf(config, { env: process.env, log });
    const { intraOpThreads, tinyKvHeads, simulate } = config;
    const loaded = await loadModel({ intraOpThreads, directory: config.model, tinyKvHeads });
    closers.add("model", () => loaded.close());
    const { directory, vocabSize } = loaded.config;
    const model =
      simulate === undefined ? loaded : simulatedModel({ ...simulate, clock, vocabSize });
    const servedName = config.servedModelName ?? loaded.config.name;
    const engineId = transferConfig.engineId ?? environment.random.uuid();
    const startRank = (dpRank: number) =>
      startEngineRank({
        config,
        transferConfig,
        transport,
        sideChannel,
        model,
        closers,
        servedName,
        dpRank,
        // As vLLM names the engines of data-parallel ranks.
        engineId: config.dp === 1 ? engineId : `${engineId}_dp${dpRank}`,
        ambient: environment,
        onCacheChange: options.onCacheChange,
      });
    const first = await startRank(0);
    const ranks = [first];
    while (ranks.length < config.dp) ranks.push(await startRank(ranks.length));

    const { role, name = null, tp, dp, blockSize, numBlocks } = config;
    const engines = ranks.map(({ engine }) => engine);
    const engineIds = ranks.map((rank) => rank.engineId);
    const { maxModelLen, platform } = first;
    const { backend } = first.journal;
    const outstanding = () => sumByName(engines.map((engine) => engine.outstanding()));
    let isClosing = false;
    const served: ServedInstance = {
      engines,
      tokenizer: await loadTokenizer(directory, vocabSize),
      modelNames: [servedName, directory],
      maxModelLen,
      maxOutputTokens: (numBlocks - 1) * blockSize,
      debug: config.debug,
      // While an engine sleeps, a proxy sends its requests to others.
      ready: () => !isClosing && !engines.some(({ sleepMode }) => sleepMode.isOn),
      status: () => ({
        role,
        name,
        engine_id: first.engineId,
        engine_ids: engineIds,
        model: servedName,
        connector: platform.module.name,
        transport: transport.name,
        platform: platform.platform.deviceType,
        p2p_tier: first.tier === undefined ? null : tierStatus(first.tier),
        backend,
        tp,
        dp,
        block_size: blockSize,
        num_blocks: numBlocks,
        free_blocks: ranks.reduce((sum, { blocks }) => sum + blocks.free, 0),
        ready: served.ready(),
        outstanding: outstanding(),
        workers: ranks.flatMap(({ workers }) => workers.map((worker) => worker.outstanding())),
      }),
      metrics: () => `${metrics.render()}${cacheMetrics(config, ranks, servedName)}`,
      kvTransfers: () => ({
        digest_tokens: DIGEST_TOKENS,
        records: ranks.flatMap(({ journal }) => journal.records),
      }),
    };
    const { httpLimits: limits, exposeErrors } = config;
    const server = new InstanceServer(served, { ...environment, limits, exposeErrors });
    closers.add("HTTP server", () => server.close());
    // The engines close before the server, so that clients get the errors of aborted requests.
    for (const { engine, dpRank } of ranks) closers.add(`engine ${dpRank}`, () => engine.close());
    const { url, port } = await server.listen(config.host, config.port);
    log.info("instance-ready", { role, url, engineIds, backend, tp, blockSize });

    const close = () => {
      isClosing = true;
      return closers.close();
    };
    const { sideChannelHost, sideChannelPort } = transferConfig;
    const { maxNumSeqs, prefixCaching, maxConcurrentBatches } = platform;
    return {
      ...served,
      url,
      port,
      /** The engine id of each data-parallel rank, as peers know it. */
      engineIds,
      backend,
      /** Where the first rank answers handshakes; null for a connector without a side channel. */
      sideChannel: first.sideChannel ?? null,
      settings: {
        ...config,
        port,
        sideChannelHost,
        sideChannelPort,
        model: directory,
        maxNumSeqs,
        prefixCaching,
        maxConcurrentBatches,
        maxModelLen,
      },
      /**
       * Refuses new requests, waits up to `graceMs` for running requests and for blocks that peers
       * are to read, then closes.
       */
      async drain(): Promise<void> {
        isClosing = true;
        log.info("instance-draining", { role, ...outstanding() });
        const idle = Promise.all(engines.map((engine) => engine.idle()));
        let timer: { cancel(): void } | undefined;
        const late = new Promise<void>((resolve) => {
          timer = clock.setTimer(resolve, config.graceMs);
        });
        await Promise.race([idle, late]);
        timer?.cancel();
        await close();
      },
      close,
      [Symbol.asyncDispose]: close,
    };
  } catch (error) {
    await closers.close();
    throw error;
  }
}

/** What `kv-pool serve` needs of it. */
const tierStatus = ({ localId, namespace }: CacheTier) => {
  const { blockLengthBytes, fingerprint, hashSeed } = namespace;
  return {
    peer_id: localId,
    block_length_bytes: blockLengthBytes,
    fingerprint,
    hash_seed: hashSeed,
  };
};

function sumByName(counts: readonly Readonly<Record<string, number>>[]): Record<string, number> {
  const sums: Record<string, number> = {};
  for (const [name, count] of counts.flatMap(Object.entries<number>))
    sums[name] = (sums[name] ?? 0) + count;
  return sums;
}

/** vLLM's metrics of the cache: `kv-peer` computes the used blocks from them. */
function cacheMetrics(
  { blockSize, numBlocks }: InstanceConfig,
  ranks: readonly EngineRank[],
  model: string,
): string {
  const gauge = (name: string, help: string, sampleOf: (rank: EngineRank) => string) =>
    `# HELP ${name} ${help}\n# TYPE ${name} gauge\n${ranks.map((rank) => `${name}${sampleOf(rank)}\n`).join("")}`;
  const named = (sample: (rank: EngineRank) => number) => (rank: EngineRank) =>
    `{engine="${rank.dpRank}",model_name=${JSON.stringify(model)}} ${sample(rank)}`;
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
      named(({ blocks }) => blocks.held / (numBlocks - 1)),
    ),
    gauge(
      "vllm:num_requests_running",
      "Requests in execution.",
      named(({ engine }) => engine.requestCounts().running),
    ),
    gauge(
      "vllm:num_requests_waiting",
      "Requests that wait.",
      named(({ engine }) => {
        const { waiting, remote } = engine.requestCounts();
        return waiting + remote;
      }),
    ),
  ].join("");
}
