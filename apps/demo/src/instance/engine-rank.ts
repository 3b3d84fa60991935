import { delegateTo } from "@kv/connector/building-blocks";
import {
  type Ambient,
  type EngineIdentity,
  KvError,
  type KvTransferConfig,
  type Platform,
  type SideChannel,
  type Transport,
  type WorkerConnector,
} from "@kv/interface";
import { BlockPool, type CacheChange } from "../engine/cache/block-pool.js";
import { CacheTier } from "../engine/cache/cache-tier.js";
import { KvPool } from "../engine/cache/kv-pool.js";
import { Engine } from "../engine/engine.js";
import type { EngineModel } from "../engine/engine-model.js";
import type { CloseStack } from "./close-stack.js";
import { demoConnectors } from "./connectors.js";
import type { InstanceConfig } from "./instance-config.js";
import { choosePlatform } from "./instance-platform.js";
import { KvJournal } from "./kv-journal.js";
import { addCacheKind } from "./modules.js";

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
  readonly onCacheChange?: ((change: CacheChange) => void) | undefined;
}

/** A data-parallel rank: an engine with a cache, a connector and a side channel of its own. */
export type EngineRank = Awaited<ReturnType<typeof startEngineRank>>;

/**
 * Starts the engine of a rank. What it opens is added to `closers`.
 * @throws The errors of the connector, the platform and the transport.
 */
export async function startEngineRank(options: EngineRankOptions) {
  const { config, transferConfig, dpRank, engineId, transport, model, closers } = options;
  const { numBlocks, blockSize, tp, attentionBackend, cacheKindModule } = config;
  const metrics = labelled(options.ambient.metrics, String(dpRank));
  const ambient = { ...options.ambient, metrics };
  const journal = new KvJournal(transport, ambient.clock);
  const connector = await demoConnectors().resolve(transferConfig);
  const platform = await choosePlatform(config, connector, { ...ambient, transport }, journal);
  closers.add(`device ${dpRank}`, async () => platform.close());
  const maxModelLen = maxModelLenOf(config, platform.platform, model.config.maxModelLen);
  const pool = new KvPool({
    transport,
    geometry: model.config,
    numBlocks,
    blockSize,
    tp,
    attentionBackend,
    ...platform.pool,
    cacheKind: cacheKindModule && (await addCacheKind(cacheKindModule)),
  });
  closers.add(`KV pool ${dpRank}`, async () => pool.close());
  /** Where it answers handshakes; undefined for a connector without a side channel. */
  let address: SideChannelAddress | undefined;
  const connectorOptions = {
    ...ambient,
    config: transferConfig,
    engine: identityOf(options),
    transport: journal.transport,
    sideChannel: observed(options.sideChannel, (opened) => {
      address ??= opened;
    }),
  };
  const workers: WorkerConnector[] = [];
  for (const [tpRank, caches] of pool.caches.entries()) {
    journal.addCaches(caches);
    const worker = await platform.module.createWorker({
      ...connectorOptions,
      tpRank,
      ppRank: 0,
      platform: platform.platform,
    });
    closers.add(`worker ${tpRank}`, () => worker.close());
    await worker.registerKvCaches(caches);
    workers.push(worker);
  }
  const scheduler = await platform.module.createScheduler({
    ...connectorOptions,
    cache: pool.config,
  });
  closers.add("scheduler", () => scheduler.close());
  await scheduler.setHandshakeMetadata(
    await Promise.all(workers.map((worker) => worker.handshakeMetadata())),
  );
  const { onCacheChange: onChange } = options;
  const blocks = new BlockPool({ numBlocks, fragmented: config.fragmented, onChange });
  const tier = await openCacheTier(options, { ...ambient, pool, blocks, maxModelLen });
  const engine = new Engine({
    ...ambient,
    model,
    pool,
    blocks,
    connector: { scheduler, workers },
    tier,
    hooks: journal.hooks(pool, config.digests),
    maxNumSeqs: platform.maxNumSeqs,
    maxModelLen,
    maxNumBatchedTokens: config.maxNumBatchedTokens,
    // The simulated model takes the time of one pass after another.
    maxConcurrentBatches: config.simulate === undefined ? platform.maxConcurrentBatches : 1,
    reportLayers: transferConfig.extra["push_layerwise"] === true,
    prefixCaching: platform.prefixCaching,
  });
  return {
    dpRank,
    engineId,
    engine,
    maxModelLen,
    blocks,
    tier,
    platform,
    workers,
    journal,
    sideChannel: address,
  };
}

async function openCacheTier(
  { config, dpRank, servedName: model, transport, closers }: EngineRankOptions,
  {
    maxModelLen,
    ...parts
  }: Ambient & {
    readonly pool: KvPool;
    readonly blocks: BlockPool;
    readonly maxModelLen: number;
  },
): Promise<CacheTier | undefined> {
  const { tierPort, blockSize } = config;
  if (tierPort === undefined) return undefined;
  const tier = await CacheTier.open({
    ...parts,
    model,
    transport,
    host: config.host,
    port: tierPort === 0 ? 0 : tierPort + dpRank,
    promptBlocks: Math.ceil(maxModelLen / blockSize),
  });
  closers.add(`P2P tier ${dpRank}`, () => tier.close());
  return tier;
}

/**
 * As in vLLM, the cache must hold one sequence of that length.
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
  const { attentionBackend: hashedAttentionBackend, ...compat } = config.compat;
  return {
    engineId,
    tpSize: config.tp,
    ppSize: 1,
    dpRank,
    model: {
      ...compat,
      model: compat.model ?? servedName,
      speculativeConfig: null,
      // The interface takes an absent key only.
      ...(hashedAttentionBackend === undefined ? {} : { hashedAttentionBackend }),
    },
  };
}

export interface SideChannelAddress {
  readonly host: string;
  readonly port: number;
}

/** A side channel that reports the address of each listener, as port 0 takes a free one. */
function observed(
  sideChannel: SideChannel,
  onListening: (address: SideChannelAddress) => void,
): SideChannel {
  const { withEncryption } = sideChannel;
  const overrides: Partial<SideChannel> = {
    async listen(options) {
      const listener = await sideChannel.listen(options);
      onListening({ host: listener.host, port: listener.port });
      return listener;
    },
  };
  if (withEncryption !== undefined)
    overrides.withEncryption = (keys) =>
      observed(withEncryption.call(sideChannel, keys), onListening);
  return delegateTo(sideChannel, overrides);
}
