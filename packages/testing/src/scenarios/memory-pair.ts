import type { ConnectorPair } from "@kv/conformance/connector";
import { cpuPlatform, readTransferConfig } from "@kv/connector";
import type { ConnectorModule } from "@kv/interface";
import { pullConnector } from "@kv/pull";
import {
  memoryNetwork,
  memorySideChannel,
  memoryTransport,
  seededRandom,
  virtualClock,
} from "@kv/transport-memory";
import { engineIdentity } from "../engine-identity.js";
import { simConfig } from "../simulator/sim-config.js";
import { createSimRanks } from "../simulator/sim-ranks.js";

/** Two engines on the memory transport, in virtual time, for the conformance suite. */
export async function memoryPair({
  tpSize,
  connector = pullConnector,
}: {
  tpSize: number;
  connector?: ConnectorModule;
}): Promise<ConnectorPair> {
  const clock = virtualClock();
  const network = memoryNetwork({
    clock,
    random: seededRandom(7),
    latency: { latencyMs: 1, jitterMs: 1, minPieces: 3, lingerMs: 4 },
  });
  const closers: (() => Promise<void>)[] = [];
  const end = async (name: string, skewMs: number) => {
    const host = network.host(name, { skewMs });
    const transport = memoryTransport({ network, host });
    const sideChannel = memorySideChannel({ network, host });
    const cache = simConfig(16);
    const ranks = createSimRanks({ transport, config: cache, tpSize, numBlocks: 64 });
    closers.push(async () => {
      await transport.close();
      ranks.close();
      await sideChannel.close();
    });
    const options = {
      clock: host.clock,
      random: host.random,
      config: {
        ...readTransferConfig({ kv_connector: "NixlConnector", kv_role: "kv_both" }),
        sideChannelHost: name,
      },
      engine: engineIdentity(name, { tpSize }),
      cache,
      transport,
      platform: cpuPlatform(),
      sideChannel,
    };
    return {
      scheduler: await connector.createScheduler(options),
      workers: await Promise.all(
        ranks.caches.map((_, tpRank) => connector.createWorker({ ...options, tpRank, ppRank: 0 })),
      ),
      caches: ranks.caches,
    };
  };
  return {
    prefill: await end("p", 1_000_000),
    decode: await end("d", -70_000),
    progress: () => clock.advance(1),
    pendingTimers: () => clock.pendingTimers,
    async close() {
      for (const close of closers) await close();
    },
  };
}
