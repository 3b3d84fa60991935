import {
  type AmbientOptions,
  type ConnectorModule,
  type EngineIdentity,
  type KvCacheConfig,
  KvError,
  type KvTransferConfig,
  type Platform,
  type SideChannel,
  type Transport,
} from "@kv/interface";
import type { EngineRanks } from "./ranks.js";

export interface SidesOptions extends AmbientOptions {
  readonly connector: ConnectorModule;
  readonly config: KvTransferConfig;
  readonly engine: EngineIdentity;
  readonly cache: KvCacheConfig;
  readonly transport: Transport;
  readonly sideChannel: SideChannel;
  readonly platform: Platform;
  readonly ranks: EngineRanks;
  /** Each step waits until its blocks are saved. */
  readonly staged: boolean;
}

export type EngineSides = Awaited<ReturnType<typeof createSides>>;

/** An engine's connectors. The caller registers the caches. */
export async function createSides({ connector, ranks, staged, ...given }: SidesOptions) {
  const { config, engine, transport } = given;
  const own = listening(given.sideChannel);
  const { sideChannel } = own;
  const closeRest = async () => {
    await transport.close();
    ranks.close();
    await sideChannel.close();
  };
  const create = async () => {
    const scheduler = await connector.createScheduler({ ...given, sideChannel });
    const workers = await Promise.all(
      ranks.caches.map((_, rank) =>
        connector.createWorker({
          ...given,
          sideChannel,
          tpRank: rank % engine.tpSize,
          ppRank: Math.floor(rank / engine.tpSize),
        }),
      ),
    );
    return { scheduler, workers };
  };
  const { scheduler, workers } = await create().catch(async (error: unknown) => {
    await closeRest();
    throw error;
  });
  return {
    scheduler,
    workers,
    ranks,
    cache: given.cache,
    staged,
    address: () => ({ host: config.sideChannelHost, port: own.port() }),
    async close() {
      await Promise.all(workers.map((worker) => worker.close()));
      await scheduler.close();
      await closeRest();
    },
  };
}

export async function registerCaches({
  scheduler,
  workers,
  ranks,
}: Pick<EngineSides, "scheduler" | "workers" | "ranks">): Promise<void> {
  for (const [rank, worker] of workers.entries()) {
    const caches = ranks.caches[rank];
    if (caches !== undefined) await worker.registerKvCaches(caches);
  }
  await scheduler.setHandshakeMetadata(
    await Promise.all(workers.map((worker) => worker.handshakeMetadata())),
  );
}

function listening(sideChannel: SideChannel) {
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
    port(): number {
      if (bound === undefined)
        throw new KvError("KV_INTERNAL", "the side channel does not listen yet");
      return bound;
    },
  };
}
