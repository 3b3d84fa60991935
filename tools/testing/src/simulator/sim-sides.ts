import { cpuPlatform, cudaPlatform, readTransferConfig } from "@kv/connector";
import {
  type AmbientOptions,
  type KvCacheConfig,
  KvError,
  noMetrics,
  type SchedulerConnector,
  type SideChannel,
  silentLog,
  type WorkerConnector,
} from "@kv/interface";
import { pullConnector } from "@kv/pull";
import { type MemoryHost, memorySideChannel, memoryTransport } from "@kv/transport-memory";
import { engineIdentity } from "../engine-identity.js";
import { sabotagedSideChannel, sabotagedTransport } from "../faults/sabotage.js";
import { plainSideChannel } from "../scenarios/plain-vllm-peer.js";
import { simConfig } from "./sim-config.js";
import type { SimEngineOptions } from "./sim-options.js";
import { createSimRanks, type SimRanks } from "./sim-ranks.js";

/** Both sides of a real connector, and the ranks' memory. */
export interface SimSides {
  readonly scheduler: SchedulerConnector;
  readonly workers: readonly WorkerConnector[];
  readonly ranks: SimRanks;
  readonly cache: KvCacheConfig;
  /** Each step waits until the blocks that it computed are saved. */
  readonly staged: boolean;
  address(): { readonly host: string; readonly port: number };
  /** Closes what a kill leaves open. */
  bury(): Promise<void>;
  close(): Promise<void>;
}

/** Creates the sides. The caller registers the caches. */
export async function createSimSides(
  options: Omit<SimEngineOptions, "violation">,
  host: MemoryHost,
): Promise<SimSides> {
  const {
    network,
    hostName,
    engineId,
    tpSize,
    ppSize = 1,
    numBlocks,
    dcpSize = 1,
    memoryType = "DRAM",
  } = options;
  const { clock } = host;
  const ambient: AmbientOptions = {
    clock,
    random: host.random,
    metrics: options.metrics ?? noMetrics,
    log: options.log ?? silentLog,
  };
  const cache = options.cache ?? {
    ...simConfig(options.blockSize, options.numKvHeads, options.numLayers, options.kind),
    layout: options.layout ?? "LBHNC",
    attentionBackend: options.attentionBackend ?? "SIM",
  };
  const given = options.transport ?? memoryTransport({ network, host, memoryTypes: [memoryType] });
  const sabotaged = sabotagedTransport(given, options.sabotage);
  const transport = options.wrapTransport?.(sabotaged) ?? sabotaged;
  const own = listening(options.sideChannel ?? memorySideChannel({ network, host }));
  const sideChannel = sabotagedSideChannel(
    options.plain === true ? plainSideChannel(own.sideChannel) : own.sideChannel,
    options.sabotage,
  );
  const config = {
    ...readTransferConfig({
      kv_connector: "NixlConnector",
      kv_role: "kv_both",
      kv_buffer_device: memoryType === "DRAM" ? "cpu" : "cuda",
      enable_permute_local_kv: options.permutesLocalKv ?? false,
      kv_load_failure_policy: options.loadFailurePolicy ?? "fail",
      kv_connector_extra_config: options.extra ?? {},
    }),
    ...(options.sideChannel === undefined
      ? { sideChannelHost: hostName }
      : { sideChannelHost: "127.0.0.1", sideChannelPort: options.sideChannelPort ?? 0 }),
    env: options.env ?? {},
  };
  const engine = engineIdentity(engineId, {
    tpSize,
    ppSize,
    dcpSize,
    model: options.model ?? "sim",
    connectorVersion: options.connectorVersion ?? 15,
    ...(options.hashedAttentionBackend === undefined
      ? {}
      : { hashedAttentionBackend: options.hashedAttentionBackend }),
  });
  const connector = options.connector ?? pullConnector;
  const device = options.device?.({
    hostName,
    connector,
    transport,
    clock,
    config: cache,
    tpSize,
    numBlocks,
  });
  const ranks =
    device?.ranks ??
    createSimRanks({ transport, config: cache, tpSize, ppSize, dcpSize, numBlocks });
  const { createScheduler, createWorker } = device?.connector ?? connector;
  const scheduler = await createScheduler({ ...ambient, config, engine, cache, sideChannel });
  const platform = memoryType === "DRAM" ? cpuPlatform() : cudaPlatform({ gpus: ["nvidia0"] });
  const workers = await Promise.all(
    Array.from({ length: ppSize * tpSize }, (_, rank) =>
      createWorker({
        ...ambient,
        config,
        engine,
        transport,
        platform,
        sideChannel,
        tpRank: rank % tpSize,
        ppRank: Math.floor(rank / tpSize),
      }),
    ),
  );
  return {
    scheduler,
    workers,
    ranks,
    cache,
    staged: device !== undefined,
    address: () => ({ host: config.sideChannelHost, port: own.port() }),
    async bury() {
      if (options.sideChannel !== undefined) await sideChannel.close();
      if (options.transport === undefined) return;
      await transport.close();
      ranks.close();
    },
    async close() {
      await Promise.all(workers.map((worker) => worker.close()));
      await scheduler.close();
      await transport.close();
      ranks.close();
      await sideChannel.close();
    },
  };
}

/** Registers the caches of each rank, and publishes what handshakes tell. */
export async function registerCaches({ scheduler, workers, ranks }: SimSides): Promise<void> {
  for (const [rank, worker] of workers.entries()) {
    const caches = ranks.caches[rank];
    if (caches !== undefined) await worker.registerKvCaches(caches);
  }
  await scheduler.setHandshakeMetadata(
    await Promise.all(workers.map((worker) => worker.handshakeMetadata())),
  );
}

function listening(sideChannel: SideChannel): {
  readonly sideChannel: SideChannel;
  port(): number;
} {
  let bound: number | undefined;
  const wrapped = (inner: SideChannel): SideChannel => ({
    ...inner,
    async listen(given) {
      const listener = await inner.listen(given);
      bound = listener.port;
      return listener;
    },
    ...(inner.withEncryption === undefined
      ? {}
      : { withEncryption: (keys) => wrapped(inner.withEncryption?.(keys) ?? inner) }),
  });
  return {
    sideChannel: wrapped(sideChannel),
    port() {
      if (bound === undefined)
        throw new KvError("KV_INTERNAL", "the side channel does not listen yet");
      return bound;
    },
  };
}
