import type { ConnectorModule } from "@kv/interface";
import { zmqSideChannel } from "@kv/side-channel";
import { memoryNetwork } from "@kv/transport-memory";
import { expect } from "vitest";
import { held } from "../nothing-left.js";
import { createSimEngine, type SimEngine } from "../simulator/sim-engine.js";
import type { SimEngineOptions } from "../simulator/sim-options.js";

/** Engines in real time: handshakes over ZMQ on the loopback, transfers in memory. */
export function zmqEngines(connector: ConnectorModule) {
  const network = memoryNetwork();
  const violations: string[] = [];
  const engines: SimEngine[] = [];
  return {
    async engine(
      hostName: string,
      tpSize: number,
      extra: SimEngineOptions["extra"] = {},
    ): Promise<SimEngine> {
      const engine = await createSimEngine({
        network,
        hostName,
        engineId: hostName,
        tpSize,
        blockSize: 16,
        numBlocks: 64,
        connector,
        extra,
        sideChannel: zmqSideChannel(),
        violation: (what) => void violations.push(what),
      });
      engines.push(engine);
      return engine;
    },
    async end(): Promise<void> {
      expect(violations).toEqual([]);
      await Promise.all(engines.map((engine) => engine.close()));
      expect(held(network.outstanding())).toEqual({});
    },
  };
}
