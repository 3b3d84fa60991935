import { cpuPlatform, cudaPlatform, type StagingCopied, staged } from "@kv/connector";
import {
  type Clock,
  type ConnectorModule,
  type KvCaches,
  KvError,
  type Log,
  type Platform,
  type Transport,
} from "@kv/interface";
import { neuronCaches, neuronPlatform, simulatedDevice } from "@kv/neuron";
import type { KvPoolOptions } from "../engine/cache/kv-pool.js";
import type { InstanceConfig } from "./instance-config.js";
import { createPlatform } from "./modules.js";

export interface InstancePlatform {
  readonly platform: Platform;
  readonly module: ConnectorModule;
  readonly pool: Pick<KvPoolOptions, "memory" | "openCaches">;
  readonly maxNumSeqs: number;
  readonly maxConcurrentBatches: number;
  readonly prefixCaching: boolean;
  stagingBlockAt(address: number): number | undefined;
  takeCopies(requestId: string): CopyTimes | undefined;
  close(): Promise<void>;
}

/** Copies between device and host for one request. The times are those of the slowest rank. */
export interface CopyTimes {
  saveMs: number;
  loadMs: number;
  /** Blocks of the staging pool that were transferred in place of the request's. */
  wireBlockIds: readonly number[];
}

const MAX_REQUESTS = 1024;

/**
 * Builds the platform that the settings name.
 * @throws `KV_PLATFORM_UNSUPPORTED` for settings that it refuses, `KV_CONFIG_INVALID` for its
 * module.
 */
export async function choosePlatform(
  config: InstanceConfig,
  connector: ConnectorModule,
  { clock, log, transport }: { clock: Clock; log: Log; transport: Transport },
): Promise<InstancePlatform> {
  const { platform: name, platformModule, neuronFamily, maxNumSeqs, prefixCaching } = config;
  const isNeuron = name === "neuron" && platformModule === undefined;
  const chosen =
    platformModule !== undefined
      ? await createPlatform(platformModule, { log })
      : isNeuron
        ? neuronPlatform(neuronFamily === undefined ? {} : { family: neuronFamily })
        : name === "cuda"
          ? cudaPlatform(
              transport.capabilities.memoryTypes.includes("VRAM") ? { gpus: visibleGpus() } : {},
            )
          : cpuPlatform();
  const isStaged = chosen.capabilities.registersAs.length === 0;
  // A platform with staging runs one sequence, without prefix hits, unless the settings say
  // otherwise; it may refuse them.
  const settings = {
    maxNumSeqs: maxNumSeqs ?? (isStaged ? 1 : 64),
    prefixCaching: prefixCaching ?? !isStaged,
  };
  for (const { setting, message } of chosen.check(settings))
    log.warn("platform-setting", { setting, message });
  const limits = { ...settings, maxConcurrentBatches: maxConcurrentBatchesOf(config, chosen) };
  if (!isStaged) {
    return {
      ...limits,
      platform: chosen,
      module: connector,
      // Ranks take the GPUs in turns.
      pool:
        name === "cuda" && platformModule === undefined
          ? { memory: { memoryType: "VRAM", deviceOf: (rank) => rank % visibleGpus().length } }
          : {},
      stagingBlockAt: () => undefined,
      takeCopies: () => undefined,
      async close() {},
    };
  }
  const device = isNeuron
    ? simulatedDevice({
        clock,
        bytesPerMs: config.deviceBytesPerMs,
        latencyMs: config.deviceLatencyMs,
      })
    : undefined;
  const pools: KvCaches[] = [];
  const copies = new Map<string, CopyTimes>();
  const platform: Platform = {
    ...chosen,
    async createStaging(options) {
      const staging = await chosen.createStaging?.(options);
      if (staging === undefined) {
        throw new KvError(
          "KV_PLATFORM_UNSUPPORTED",
          `platform ${chosen.deviceType} registers no memory (registersAs is empty) and has no createStaging`,
        );
      }
      pools.push(staging.wireCaches);
      return staging;
    },
  };
  function copied({ requestId, direction, wire, durationMs }: StagingCopied): void {
    const times = copies.get(requestId) ?? { saveMs: 0, loadMs: 0, wireBlockIds: [] };
    if (direction === "save") times.saveMs = Math.max(times.saveMs, durationMs);
    else times.loadMs = Math.max(times.loadMs, durationMs);
    // A prompt that is computed in chunks is saved in several copies.
    times.wireBlockIds = [...new Set([...times.wireBlockIds, ...(wire[0] ?? [])])];
    copies.set(requestId, times);
    const [oldest] = copies.keys();
    if (copies.size > MAX_REQUESTS && oldest !== undefined) copies.delete(oldest);
  }
  const poolBlocks = config.stagingBlocks ?? config.numBlocks;
  return {
    ...limits,
    platform,
    module: staged(connector, { platform, poolBlocks, onCopied: copied }),
    pool: device === undefined ? {} : { openCaches: (rank) => neuronCaches({ device, ...rank }) },
    stagingBlockAt: (address) => blockAt(pools, address),
    takeCopies(requestId) {
      const times = copies.get(requestId);
      copies.delete(requestId);
      return times;
    },
    close: async () => device?.close(),
  };
}

/** The GPUs of `CUDA_VISIBLE_DEVICES`, which the driver counts from 0; GPU 0 without it. */
const visibleGpus = (): readonly string[] =>
  (process.env["CUDA_VISIBLE_DEVICES"] ?? "0").split(",");

/**
 * The setting, at most the platform's limit, which is the default.
 * @throws `KV_PLATFORM_UNSUPPORTED` for a higher one.
 */
function maxConcurrentBatchesOf(
  { maxConcurrentBatches }: InstanceConfig,
  { deviceType, capabilities }: Platform,
): number {
  const limit = capabilities.maxConcurrentBatches;
  if (maxConcurrentBatches === undefined || maxConcurrentBatches <= limit)
    return maxConcurrentBatches ?? limit;
  throw new KvError(
    "KV_PLATFORM_UNSUPPORTED",
    `maxConcurrentBatches is ${maxConcurrentBatches}, and platform ${deviceType} executes at most ${limit}`,
    { hint: "leave it out, or choose a lower one" },
  );
}

function blockAt(pools: readonly KvCaches[], address: number): number | undefined {
  for (const { regions } of pools) {
    for (const { memory, offsetBytes, numBlocks, blockStrideBytes } of regions) {
      const within = address - memory.address - offsetBytes;
      if (within >= 0 && within < numBlocks * blockStrideBytes)
        return Math.floor(within / blockStrideBytes);
    }
  }
  return undefined;
}
