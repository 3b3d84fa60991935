import { cpuPlatform, type StagingCopied, staged } from "@kv/connector";
import type { Clock, ConnectorModule, KvCaches, Log, Platform } from "@kv/interface";
import { neuronCaches, neuronPlatform, simulatedDevice } from "@kv/neuron";
import type { KvPoolOptions } from "../engine/cache/kv-pool.js";
import type { InstanceConfig } from "./instance-config.js";

/** What an instance's accelerator changes around its engine. */
export interface InstancePlatform {
  readonly platform: Platform;
  /** The connector, with staging around it where the platform needs it. */
  readonly module: ConnectorModule;
  readonly openCaches: KvPoolOptions["openCaches"];
  readonly maxNumSeqs: number;
  readonly prefixCaching: boolean;
  /** The block of the staging pool that an address lies in. */
  stagingBlockAt(address: number): number | undefined;
  /** The copies of a request, forgotten with the question. */
  takeCopies(requestId: string): CopyTimes | undefined;
  close(): Promise<void>;
}

/** Of the rank that took longest. */
export interface CopyTimes {
  saveMs: number;
  loadMs: number;
  /** Pool blocks that stood for the request's. */
  wireBlockIds: readonly number[];
}

/** Requests that nobody asks about are forgotten when so many others have come. */
const MOST_REQUESTS = 1024;

/** Errors: `KV_PLATFORM_UNSUPPORTED` for settings that the platform refuses. */
export function choosePlatform(
  config: InstanceConfig,
  connector: ConnectorModule,
  { clock, log }: { clock: Clock; log: Log },
): InstancePlatform {
  const { platform: name, maxNumSeqs, prefixCaching } = config;
  if (name === "cpu") {
    return {
      platform: cpuPlatform(),
      module: connector,
      openCaches: undefined,
      maxNumSeqs: maxNumSeqs ?? 64,
      prefixCaching: prefixCaching ?? true,
      stagingBlockAt: () => undefined,
      takeCopies: () => undefined,
      async close() {},
    };
  }
  // What the platform's limits allow, unless the settings ask for more: then they are refused.
  const settings = { maxNumSeqs: maxNumSeqs ?? 1, prefixCaching: prefixCaching ?? false };
  const neuron = neuronPlatform();
  for (const { setting, message } of neuron.check(settings))
    log.warn("platform-setting", { setting, message });
  const device = simulatedDevice({
    clock,
    bytesPerMs: config.deviceBytesPerMs,
    latencyMs: config.deviceLatencyMs,
  });
  const pools: KvCaches[] = [];
  const copies = new Map<string, CopyTimes>();
  const platform: Platform = {
    ...neuron,
    async createStaging(options) {
      const staging = await neuron.createStaging?.(options);
      if (staging === undefined) throw new Error("the Neuron platform stages");
      pools.push(staging.wireCaches);
      return staging;
    },
  };
  function copied({ requestId, direction, wire, durationMs }: StagingCopied): void {
    const times = copies.get(requestId) ?? { saveMs: 0, loadMs: 0, wireBlockIds: [] };
    if (direction === "save") times.saveMs = Math.max(times.saveMs, durationMs);
    else times.loadMs = Math.max(times.loadMs, durationMs);
    // A prompt that is computed in chunks is saved in as many copies.
    times.wireBlockIds = [...new Set([...times.wireBlockIds, ...(wire[0] ?? [])])];
    copies.set(requestId, times);
    const [oldest] = copies.keys();
    if (copies.size > MOST_REQUESTS && oldest !== undefined) copies.delete(oldest);
  }
  return {
    platform,
    module: staged(connector, {
      platform,
      poolBlocks: config.stagingBlocks ?? config.numBlocks,
      onCopied: copied,
    }),
    openCaches: (rank) => neuronCaches({ device, ...rank }),
    ...settings,
    stagingBlockAt: (address) => blockAt(pools, address),
    takeCopies(requestId) {
      const times = copies.get(requestId);
      copies.delete(requestId);
      return times;
    },
    close: () => device.close(),
  };
}

function blockAt(pools: readonly KvCaches[], address: number): number | undefined {
  for (const { regions } of pools) {
    for (const { memory, offsetBytes, numBlocks, blockStrideBytes } of regions) {
      const within = address - memory.address - offsetBytes;
      if (within >= 0 && within < numBlocks * blockStrideBytes) return Math.floor(within / blockStrideBytes);
    }
  }
  return undefined;
}
