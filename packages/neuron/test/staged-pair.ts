import type { ConnectorPair } from "@kv/conformance/connector";
import { cpuPlatform, readTransferConfig, type StagingCopied, staged } from "@kv/connector";
import {
  type ConnectorModule,
  type KvCacheConfig,
  type Log,
  silentLog,
  type Transport,
} from "@kv/interface";
import { engineIdentity } from "@kv/testing/engine-identity";
import {
  type FaultRule,
  memoryNetwork,
  memorySideChannel,
  memoryTransport,
  seededRandom,
  virtualClock,
} from "@kv/transport-memory";
import { neuronCaches, neuronPlatform } from "../src/index.js";
import { CONFIG } from "./config.js";
import { visibleDevice } from "./visible-device.js";

export interface StagedPairOptions {
  readonly connector: ConnectorModule;
  readonly tpSize?: number | undefined;
  readonly poolBlocks?: number;
  /** KV cache groups of both engines. Default: one group of two layers. */
  readonly groups?: KvCacheConfig["groups"];
  readonly faults?: FaultRule[] | undefined;
  readonly loadFailurePolicy?: "fail" | "recompute";
  readonly onCopied?: (host: string, copied: StagingCopied) => void;
  /** Called for each error that the connectors log. */
  readonly onError?: Log["error"];
  /** Called before each copy. An error that it throws fails the copy. */
  readonly beforeCopy?: (host: string, direction: "read" | "write") => void;
  readonly wrapTransport?: (transport: Transport) => Transport;
}

/**
 * Creates two Neuron engines on the memory transport in virtual time, with device memory that the
 * test can read.
 */
export async function stagedPair(options: StagedPairOptions): Promise<ConnectorPair> {
  const { connector, tpSize = 1, poolBlocks = 41, groups = CONFIG.groups } = options;
  const clock = virtualClock();
  const network = memoryNetwork({
    clock,
    random: seededRandom(7),
    latency: { latencyMs: 1, jitterMs: 1, minPieces: 3, lingerMs: 4 },
    faults: options.faults,
  });
  const closers: (() => Promise<void>)[] = [];
  const config: KvCacheConfig = { ...CONFIG, groups, numKvHeads: 4 };

  const end = async (name: string) => {
    const host = network.host(name);
    const transport = memoryTransport({ network, host });
    const sideChannel = memorySideChannel({ network, host });
    const device = visibleDevice({
      transport,
      clock,
      beforeCopy: (direction) => options.beforeCopy?.(name, direction),
    });
    closers.push(async () => {
      await transport.close();
      await device.close();
      await sideChannel.close();
    });
    const platform = neuronPlatform();
    const { onCopied } = options;
    const module = staged(connector, {
      platform,
      poolBlocks,
      ...(onCopied === undefined ? {} : { onCopied: (copied) => onCopied(name, copied) }),
    });
    const shared = {
      clock: host.clock,
      random: host.random,
      config: {
        ...readTransferConfig({
          kv_connector: "NixlConnector",
          kv_role: "kv_both",
          kv_buffer_device: "cpu",
          kv_load_failure_policy: options.loadFailurePolicy ?? "fail",
        }),
        sideChannelHost: name,
      },
      engine: engineIdentity(name, { tpSize }),
      cache: config,
      transport: options.wrapTransport?.(transport) ?? transport,
      platform: cpuPlatform(),
      sideChannel,
      log: { ...silentLog, ...(options.onError === undefined ? {} : { error: options.onError }) },
    };
    const ranks = Array.from({ length: tpSize }, (_, tpRank) => tpRank);
    return {
      scheduler: await module.createScheduler(shared),
      workers: await Promise.all(
        ranks.map((tpRank) => module.createWorker({ ...shared, tpRank, ppRank: 0 })),
      ),
      caches: ranks.map(() =>
        neuronCaches({ device, config, numBlocks: 64, numHeads: config.numKvHeads / tpSize }),
      ),
    };
  };
  return {
    prefill: await end("p"),
    decode: await end("d"),
    progress: () => clock.advance(1),
    pendingTimers: () => clock.pendingTimers,
    async close() {
      for (const close of closers) await close();
    },
  };
}
