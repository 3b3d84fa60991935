import {
  type DirectRegistration,
  engineSettings,
  type KnownEngineSettings,
  KvError,
  type Platform,
  type PlatformWarning,
  readMaxModelLen,
} from "@kv/interface";
import { neuronCacheShape } from "./staging/neuron-caches.js";
import { createNeuronStaging } from "./staging/staging.js";

/** Options of `neuronPlatform`. */
export interface NeuronPlatformOptions {
  /**
   * EC2 instance type or family, such as "trn1.32xlarge", "trn1n" or "trn2". Settings beyond trn1's
   * and trn1n's limits throw; on others they warn. @default "trn1"
   */
  readonly family?: string | undefined;
}

/**
 * NIXL's LIBFABRIC backend registers Neuron memory (FI_HMEM_NEURON) where each device has its own
 * network device, on trn2 and later.
 */
const DIRECT: readonly DirectRegistration[] = [
  {
    backend: "LIBFABRIC",
    memoryType: "VRAM",
    needs:
      "an EFA device for each Neuron device (the largest instances), and a libfabric with FI_HMEM_NEURON",
  },
];

const REASON = "the Neuron compiler fails on its graphs (NCC_ITEN404, aws-neuron-sdk #1304)";

const LIMITS: readonly {
  readonly setting: keyof KnownEngineSettings;
  readonly exceeds: (settings: KnownEngineSettings) => boolean;
  /** Where the setting is missing. */
  readonly vllmDefault: string;
  readonly hint: string;
}[] = [
  {
    setting: "prefixCaching",
    exceeds: ({ prefixCaching }) => prefixCaching !== false,
    vllmDefault: "on",
    hint: "start the engine with prefix caching off (vLLM: --no-enable-prefix-caching)",
  },
  {
    setting: "maxNumSeqs",
    exceeds: ({ maxNumSeqs }) => maxNumSeqs !== 1,
    vllmDefault: "128 or more",
    hint: "run one sequence at a time (vLLM: --max-num-seqs 1), and more prefill instances",
  },
];

/**
 * The platform of AWS Neuron, which always stages through host memory. Device K and V are separate
 * (`[2, num_blocks, num_kv_heads, block_size, head_size]`, as in vllm-neuron since its patch 20).
 * Batches run one after another. `check` throws `KV_PLATFORM_UNSUPPORTED` for settings that the
 * compiler cannot handle. `capabilities.directRegistration` says where LIBFABRIC can register
 * device memory.
 * @throws `KV_CONFIG_INVALID` for a family that is none of Neuron's.
 */
export function neuronPlatform({ family: given = "trn1" }: NeuronPlatformOptions = {}): Platform {
  const family = familyOf(given);
  const isFirstTrainium = family === "trn1" || family === "trn1n";
  return {
    deviceType: "neuron",
    capabilities: {
      registersAs: [],
      bufferDevices: ["cpu"],
      maxConcurrentBatches: 1,
      directRegistration: isFirstTrainium || family.startsWith("inf") ? [] : DIRECT,
    },
    kvCacheShape: neuronCacheShape,
    maxModelLen: readMaxModelLen,
    check(given) {
      const settings = engineSettings(given);
      const warnings: PlatformWarning[] = [];
      for (const { setting, exceeds, hint, vllmDefault } of LIMITS) {
        if (!exceeds(settings)) continue;
        const value = settings[setting];
        const said =
          value === undefined ? `not set, and vLLM's default is ${vllmDefault}` : String(value);
        const message = `${setting} is ${said}: on ${family} ${REASON}`;
        if (isFirstTrainium) {
          throw new KvError("KV_PLATFORM_UNSUPPORTED", message, { hint, details: { family } });
        }
        warnings.push({ setting, message: `${setting} is ${said}: on trn1 ${REASON}` });
      }
      return warnings;
    },
    createStaging: createNeuronStaging,
  };
}

/**
 * "trn1" of "trn1.32xlarge".
 * @throws `KV_CONFIG_INVALID`.
 */
function familyOf(instanceType: string): string {
  const [, family] = /^((?:trn|inf)[1-9][a-z]*)(?:\.[a-z0-9-]+)?$/.exec(instanceType) ?? [];
  if (family !== undefined) return family;
  throw new KvError(
    "KV_CONFIG_INVALID",
    `${JSON.stringify(instanceType)} is no instance type with Neuron devices`,
    { hint: 'such as "trn1", "trn1n.32xlarge", "trn2" or "inf2.48xlarge"' },
  );
}
