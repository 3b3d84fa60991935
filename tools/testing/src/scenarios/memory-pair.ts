import type { ConnectorPair } from "@kv/conformance/connector";
import type { ConnectorModule } from "@kv/interface";
import { memoryNetwork, seededRandom, virtualClock } from "@kv/transport-memory";
import { createSimSides } from "../simulator/sim-sides.js";

export async function memoryPair(options: {
  readonly tpSize: number;
  readonly connector?: ConnectorModule;
}): Promise<ConnectorPair> {
  const clock = virtualClock();
  const network = memoryNetwork({
    clock,
    random: seededRandom(7),
    latency: { latencyMs: 1, jitterMs: 1, minPieces: 3, lingerMs: 4 },
  });
  const end = (hostName: string, skewMs: number) =>
    createSimSides(
      { ...options, network, hostName, engineId: hostName, blockSize: 16, numBlocks: 64 },
      network.host(hostName, { skewMs }),
    );
  const [p, d] = [await end("p", 1_000_000), await end("d", -70_000)];
  return {
    prefill: { ...p, caches: p.ranks.caches },
    decode: { ...d, caches: d.ranks.caches },
    progress: () => clock.advance(1),
    pendingTimers: () => clock.pendingTimers,
    async close() {
      await p.close();
      await d.close();
    },
  };
}
