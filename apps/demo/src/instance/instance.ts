import { memoryMetrics } from "@kv/connector";
import { type Ambient, ambient, KvError, type SideChannel, type Transport } from "@kv/interface";
import { DIGEST_TOKENS } from "../engine/cache/kv-layout.js";
import type { ServedInstance } from "../http/generation.js";
import { InstanceServer } from "../http/server.js";
import { loadModel } from "../model/model.js";
import { simulatedModel } from "../model/simulated-model.js";
import { loadTokenizer } from "../model/tokenizer/tokenizer.js";
import { CloseStack } from "./close-stack.js";
import { type EngineRank, startEngineRank } from "./engine-rank.js";
import { type InstanceConfig, transferConfigOf } from "./instance-config.js";
import { KvJournal } from "./kv-journal.js";

/** Transport and side channel belong to the instance, which closes them. */
export interface InstanceOptions extends Partial<Omit<Ambient, "metrics">> {
  readonly transport: Transport;
  readonly sideChannel: SideChannel;
}

/** A prefill or decode server that runs. */
export type Instance = Awaited<ReturnType<typeof startInstance>>;

/**
 * Starts an instance: model, paged cache, an engine with a connector for each data-parallel rank,
 * HTTP. What was opened is closed then.
 * @throws `KV_CONFIG_INVALID`, `KV_PLATFORM_UNSUPPORTED`, `KV_MODEL_UNSUPPORTED`; those of the
 * connector, the transport and the side channel.
 */
export async function startInstance(config: InstanceConfig, options: InstanceOptions) {
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
    const [first] = ranks;
    if (first === undefined) throw new KvError("KV_INTERNAL", "the instance has no rank");

    const { role, tp, blockSize, numBlocks, httpLimits: limits, exposeErrors } = config;
    const { maxModelLen } = first;
    const engines = ranks.map(({ engine }) => engine);
    const engineIds = ranks.map((rank) => rank.engineId);
    const backend = first.backend();
    const outstanding = () => sumByName(engines.map((engine) => engine.outstanding()));
    let isClosing = false;
    const served: ServedInstance = {
      engines,
      tokenizer: await loadTokenizer({ directory, vocabSize }),
      modelNames: [name, directory],
      maxModelLen,
      maxOutputTokens: (numBlocks - 1) * blockSize,
      debug: config.debug,
      zeroBlockOf: (requestId, block) => void blocksToZero.set(requestId, block),
      // While an engine sleeps, a proxy sends its requests to others.
      ready: () => !isClosing && !engines.some(({ sleepMode }) => sleepMode.isOn),
      status: () => ({
        role,
        name: config.name ?? null,
        engine_id: first.engineId,
        engine_ids: engineIds,
        model: name,
        connector: first.platform.module.name,
        transport: transport.name,
        platform: first.platform.platform.deviceType,
        backend,
        tp,
        dp: config.dp,
        block_size: blockSize,
        num_blocks: numBlocks,
        free_blocks: ranks.reduce((sum, { blocks }) => sum + blocks.free, 0),
        ready: served.ready(),
        outstanding: outstanding(),
        workers: ranks.flatMap(({ workers }) => workers.map((worker) => worker.outstanding())),
      }),
      metrics: () => `${metrics.render()}${cacheMetrics(config, ranks, name)}`,
      kvTransfers: () => ({ digest_tokens: DIGEST_TOKENS, records: journal.records }),
    };
    const server = new InstanceServer(served, { ...environment, limits, exposeErrors });
    closers.add("HTTP server", () => server.close());
    // The engines close before the server, so that clients get the errors of aborted requests.
    for (const { engine, dpRank } of ranks) closers.add(`engine ${dpRank}`, () => engine.close());
    const { url, port } = await server.listen({ host: config.host, port: config.port });
    log.info("instance-ready", { role, url, engineIds, backend, tp, blockSize });

    const close = () => {
      isClosing = true;
      return closers.close();
    };
    const { sideChannelHost, sideChannelPort } = first.transferConfig;
    const { maxNumSeqs, prefixCaching, maxConcurrentBatches } = first.platform;
    return {
      ...served,
      engines,
      url,
      port,
      /** The engine id of each data-parallel rank, as peers know it. */
      engineIds,
      backend,
      /** Where the first rank answers handshakes; null for a connector without a side channel. */
      sideChannel: first.sideChannel ?? null,
      /** The settings in effect. */
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
        await waitAtMost(idle, config.graceMs, clock);
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
  const gauge = (name: string, help: string, sample: (rank: EngineRank) => number) =>
    `# HELP ${name} ${help}\n# TYPE ${name} gauge\n${ranks.map((rank) => `${name}{engine="${rank.dpRank}",model_name=${JSON.stringify(model)}} ${sample(rank)}\n`).join("")}`;
  const info = ranks.map(
    ({ dpRank }) =>
      `vllm:cache_config_info{block_size="${blockSize}",engine="${dpRank}",num_gpu_blocks="${numBlocks}"} 1.0\n`,
  );
  return [
    "# HELP vllm:cache_config_info Information of the cache.\n# TYPE vllm:cache_config_info gauge\n",
    ...info,
    gauge(
      "vllm:kv_cache_usage_perc",
      "Share of the blocks in use; 1 is all of them.",
      ({ blocks }) => blocks.held / (numBlocks - 1),
    ),
    gauge(
      "vllm:num_requests_running",
      "Requests in execution.",
      ({ engine }) => engine.requestCounts().running,
    ),
    gauge("vllm:num_requests_waiting", "Requests that wait.", ({ engine }) => {
      const { waiting, remote } = engine.requestCounts();
      return waiting + remote;
    }),
  ].join("");
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
