import { cpuPlatform, cudaPlatform, staged } from "@kv/connector";
import {
  type Clock,
  type ConnectorModule,
  KvError,
  type Log,
  type Platform,
  type Transport,
} from "@kv/interface";
import { neuronCaches, neuronPlatform, simulatedDevice } from "@kv/neuron";
import type { KvPoolOptions } from "../engine/cache/kv-pool.js";
import type { InstanceConfig } from "./instance-config.js";
import type { KvJournal } from "./kv-journal.js";
import { createPlatform } from "./modules.js";

export interface InstancePlatform {
  readonly platform: Platform;
  readonly module: ConnectorModule;
  readonly pool: Pick<KvPoolOptions, "memory" | "openCaches">;
  readonly maxNumSeqs: number;
  readonly maxConcurrentBatches: number;
  readonly prefixCaching: boolean;
  close(): void;
}

/**
 * Builds the platform that the settings name.
 * @throws `KV_PLATFORM_UNSUPPORTED` for settings that it refuses, `KV_CONFIG_INVALID` for its
 * module.
 */
export async function choosePlatform(
  config: InstanceConfig,
  connector: ConnectorModule,
  { clock, log, transport }: { clock: Clock; log: Log; transport: Transport },
  journal: KvJournal,
): Promise<InstancePlatform> {
  const { platformModule, neuronFamily } = config;
  const name = platformModule === undefined ? config.platform : "module";
  const hasGpus = transport.capabilities.memoryTypes.includes("VRAM");
  const platforms = {
    cpu: () => cpuPlatform(),
    cuda: () => cudaPlatform(hasGpus ? { gpus: visibleGpus() } : {}),
    neuron: () => neuronPlatform(neuronFamily === undefined ? {} : { family: neuronFamily }),
    module: () => createPlatform(platformModule ?? "", { log }),
  };
  const platform = await platforms[name]();
  const { registersAs, maxConcurrentBatches: mostBatches } = platform.capabilities;
  const isStaged = registersAs.length === 0;
  // With staging, one sequence without prefix hits, unless the settings say otherwise.
  const settings = {
    maxNumSeqs: config.maxNumSeqs ?? (isStaged ? 1 : 64),
    prefixCaching: config.prefixCaching ?? !isStaged,
  };
  for (const { setting, message } of platform.check(settings))
    log.warn("platform-setting", { setting, message });
  const { maxConcurrentBatches = mostBatches } = config;
  if (maxConcurrentBatches > mostBatches) {
    throw new KvError(
      "KV_PLATFORM_UNSUPPORTED",
      `maxConcurrentBatches is ${maxConcurrentBatches}, and platform ${platform.deviceType} executes at most ${mostBatches}`,
      { hint: "leave it out, or choose a lower one" },
    );
  }
  const limits = { ...settings, maxConcurrentBatches };
  if (!isStaged) {
    // Ranks take the GPUs in turns.
    const deviceOf = (rank: number) => rank % visibleGpus().length;
    const pool = name === "cuda" ? { memory: { memoryType: "VRAM", deviceOf } as const } : {};
    return { ...limits, platform, module: connector, pool, close() {} };
  }
  const stagedPlatform: Platform = {
    ...platform,
    async createStaging(options) {
      const staging = await platform.createStaging?.(options);
      if (staging === undefined) {
        throw new KvError(
          "KV_PLATFORM_UNSUPPORTED",
          `platform ${platform.deviceType} registers no memory (registersAs is empty) and has no createStaging`,
        );
      }
      journal.addCaches(staging.wireCaches);
      return staging;
    },
  };
  const module = staged(connector, {
    platform: stagedPlatform,
    poolBlocks: config.stagingBlocks ?? config.numBlocks,
    onCopied: (copied) => journal.copied(copied),
  });
  if (name !== "neuron")
    return { ...limits, platform: stagedPlatform, module, pool: {}, close() {} };
  const { deviceBytesPerMs: bytesPerMs, deviceLatencyMs: latencyMs } = config;
  const device = simulatedDevice({ clock, bytesPerMs, latencyMs });
  return {
    ...limits,
    platform: stagedPlatform,
    module,
    pool: { openCaches: (rank) => neuronCaches({ device, ...rank }) },
    close: () => device.close(),
  };
}

/** The GPUs of `CUDA_VISIBLE_DEVICES`, which the driver counts from 0; GPU 0 without it. */
const visibleGpus = (): readonly string[] =>
  (process.env["CUDA_VISIBLE_DEVICES"] ?? "0").split(",");
