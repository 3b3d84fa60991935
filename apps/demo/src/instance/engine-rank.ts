import {
  type Ambient,
  type EngineIdentity,
  KvError,
  type KvTransferConfig,
  type Platform,
  type SchedulerConnector,
  type SideChannel,
  type Transport,
  type WorkerConnector,
} from "@kv/interface";
import { BlockPool } from "../engine/cache/block-pool.js";
import { KvPool } from "../engine/cache/kv-pool.js";
import { Engine } from "../engine/engine.js";
import type { EngineModel } from "../engine/engine-model.js";
import type { CloseStack } from "./close-stack.js";
import { demoConnectors } from "./connectors.js";
import type { InstanceConfig } from "./instance-config.js";
import { choosePlatform, type InstancePlatform } from "./instance-platform.js";
import { type KvJournal, observeKv } from "./kv-journal.js";
import { addCacheKind } from "./modules.js";
import { meterTransfers } from "./transfer-meter.js";

export interface EngineRankOptions {
  readonly config: InstanceConfig;
  readonly transferConfig: KvTransferConfig;
  readonly dpRank: number;
  readonly engineId: string;
  readonly servedName: string;
  readonly transport: Transport;
  readonly sideChannel: SideChannel;
  readonly model: EngineModel;
  readonly ambient: Ambient;
  readonly closers: CloseStack;
  readonly journal: KvJournal;
  readonly blocksToZero: Map<string, number>;
}

/**
 * One data-parallel rank of an instance: an engine with a cache, a connector and a side channel of
 * its own.
 */
export interface EngineRank
  extends Pick<EngineRankOptions, "dpRank" | "engineId" | "transferConfig"> {
  readonly maxModelLen: number;
  readonly engine: Engine;
  readonly blocks: BlockPool;
  readonly platform: InstancePlatform;
  readonly workers: readonly WorkerConnector[];
  /** Where it answers handshakes; undefined for a connector without a side channel. */
  readonly sideChannel: SideChannelAddress | undefined;
  backend(): string;
}

/**
 * Starts the engine of a rank. What it opens is added to `closers`.
 * @throws The errors of the connector, the platform and the transport.
 */
export async function startEngineRank(options: EngineRankOptions): Promise<EngineRank> {
  const { config, transferConfig, dpRank, engineId, model, closers, journal, blocksToZero } =
    options;
  const { clock } = options.ambient;
  const environment = {
    ...options.ambient,
    metrics: labelled(options.ambient.metrics, String(dpRank)),
  };
  const platform = await choosePlatform(config, await demoConnectors().resolve(transferConfig), {
    ...environment,
    transport: options.transport,
  });
  closers.add(`device ${dpRank}`, () => platform.close());
  const maxModelLen = maxModelLenOf(config, platform.platform, model.config.maxModelLen);
  const cacheKind =
    config.cacheKindModule === undefined ? undefined : await addCacheKind(config.cacheKindModule);
  let pool: KvPool | undefined;
  const meter = meterTransfers(options.transport, {
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
    ...platform.pool,
    cacheKind,
  });
  pool = kv;
  closers.add(`KV pool ${dpRank}`, async () => kv.close());
  let sideChannel: SideChannelAddress | undefined;
  const { scheduler, workers } = await openConnector(platform, kv, closers, {
    ...environment,
    config: transferConfig,
    engine: identityOf(options),
    transport: meter.transport,
    sideChannel: observedSideChannel(options.sideChannel, (opened) => {
      sideChannel ??= opened;
    }),
  });
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
    maxModelLen,
    maxNumBatchedTokens: config.maxNumBatchedTokens,
    // The simulated model takes the time of one pass after another.
    maxConcurrentBatches: config.simulate === undefined ? platform.maxConcurrentBatches : 1,
    reportLayers: transferConfig.extra.push_layerwise === true,
    prefixCaching: platform.prefixCaching,
  });
  return {
    dpRank,
    engineId,
    maxModelLen,
    transferConfig,
    engine,
    blocks,
    platform,
    workers,
    sideChannel,
    backend: () => meter.backends()[0] ?? "none",
  };
}

/**
 * The longest sequence that every request may have: the setting, else the model's. As in vLLM, the
 * cache must hold one such sequence.
 * @throws `KV_CONFIG_INVALID`.
 */
function maxModelLenOf(config: InstanceConfig, platform: Platform, ofModel: number): number {
  const { maxModelLen, blockSize, numBlocks } = config;
  const ofCache = (numBlocks - 1) * blockSize;
  const ofPlatform = platform.maxModelLen({
    max_model_len: maxModelLen,
    max_position_embeddings: ofModel,
  });
  if (maxModelLen === undefined) return Math.min(ofPlatform, ofCache);
  const refuse = (limit: string, hint: string): never => {
    throw new KvError("KV_CONFIG_INVALID", `maxModelLen is ${maxModelLen}, and ${limit}`, { hint });
  };
  if (maxModelLen > ofModel)
    refuse(`the model has ${ofModel} positions`, "choose a lower one, or leave it out");
  if (maxModelLen > ofCache)
    refuse(`the cache holds ${ofCache} tokens`, "raise numBlocks, or choose a lower maxModelLen");
  return ofPlatform;
}

function labelled({ count, observe }: Ambient["metrics"], engine: string): Ambient["metrics"] {
  return {
    count: (name, by, labels) => count(name, by, { engine, ...labels }),
    observe: (name, value, labels) => observe(name, value, { engine, ...labels }),
  };
}

function identityOf({ config, dpRank, engineId, servedName }: EngineRankOptions): EngineIdentity {
  const { compat } = config;
  return {
    engineId,
    tpSize: config.tp,
    ppSize: 1,
    dpRank,
    model: {
      model: compat.model ?? servedName,
      vllmVersion: compat.vllmVersion,
      connectorVersion: compat.connectorVersion,
      isHmaEnabled: compat.isHmaEnabled,
      speculativeConfig: null,
      // The interface takes an absent key only.
      ...(compat.attentionBackend === undefined
        ? {}
        : { hashedAttentionBackend: compat.attentionBackend }),
    },
  };
}

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

export interface SideChannelAddress {
  readonly host: string;
  readonly port: number;
}

/** A side channel that reports the address of each listener, as port 0 takes a free one. */
function observedSideChannel(
  sideChannel: SideChannel,
  onListening: (address: SideChannelAddress) => void,
): SideChannel {
  const withEncryption = sideChannel.withEncryption?.bind(sideChannel);
  return {
    async listen(options) {
      const listener = await sideChannel.listen(options);
      onListening({ host: listener.host, port: listener.port });
      return listener;
    },
    request: (options) => sideChannel.request(options),
    close: () => sideChannel.close(),
    ...(withEncryption === undefined
      ? {}
      : { withEncryption: (keys) => observedSideChannel(withEncryption(keys), onListening) }),
  };
}
