import {
  type DirectRegistration,
  KvError,
  type Platform,
  type PlatformEngineSettings,
  type PlatformWarning,
} from "@kv/interface";
import { neuronCacheShape } from "./staging/neuron-caches.js";
import { createNeuronStaging } from "./staging/staging.js";

/** Options of `neuronPlatform`. */
export interface NeuronPlatformOptions {
  /** Instance family, the first part of the instance type. On trn1 settings beyond its limits throw; on other families they warn. Default: "trn1". */
  readonly family?: string | undefined;
}

/** NIXL's LIBFABRIC backend registers Neuron memory (FI_HMEM_NEURON) where each device has its own network device, which trn1 lacks. */
const DIRECT: readonly DirectRegistration[] = [
  {
    backend: "LIBFABRIC",
    memoryType: "VRAM",
    needs:
      "an EFA device for each Neuron device (the largest instances), and a libfabric with FI_HMEM_NEURON",
  },
];

const REASON = "the Neuron compiler fails on its graphs (NCC_ITEN404, aws-neuron-sdk #1304)";

/** Settings that do not work on trn1, and their remedies. */
const LIMITS: readonly {
  readonly setting: keyof PlatformEngineSettings & string;
  readonly exceeds: (settings: PlatformEngineSettings) => boolean;
  readonly hint: string;
}[] = [
  {
    setting: "prefixCaching",
    exceeds: ({ prefixCaching }) => prefixCaching === true,
    hint: "start the engine with prefix caching off (vLLM: --no-enable-prefix-caching)",
  },
  {
    setting: "maxNumSeqs",
    exceeds: ({ maxNumSeqs }) => maxNumSeqs !== undefined && maxNumSeqs > 1,
    hint: "run one sequence at a time (vLLM: --max-num-seqs 1), and more prefill instances",
  },
];

/**
 * Creates the platform of AWS Neuron. It always stages through host memory. K and V of a layer are separate on the device
 * (`[2, num_blocks, num_kv_heads, block_size, head_size]`, as in vllm-neuron since its patch 20). Batches execute one after another. `check` throws
 * `KV_PLATFORM_UNSUPPORTED` for settings that the compiler cannot handle. Where NIXL's LIBFABRIC can register device memory directly,
 * `capabilities.directRegistration` says so.
 */
export function neuronPlatform({ family = "trn1" }: NeuronPlatformOptions = {}): Platform {
  return {
    deviceType: "neuron",
    capabilities: {
      registersAs: [],
      bufferDevices: ["cpu"],
      maxConcurrentBatches: 1,
      directRegistration: family === "trn1" ? [] : DIRECT,
    },
    kvCacheShape: neuronCacheShape,
    maxModelLen,
    check(settings) {
      const warnings: PlatformWarning[] = [];
      for (const { setting, exceeds, hint } of LIMITS) {
        if (!exceeds(settings)) continue;
        const message = `${setting} is ${String(settings[setting])}: on ${family} ${REASON}`;
        if (family === "trn1") {
          throw new KvError("KV_PLATFORM_UNSUPPORTED", message, { hint, details: { family } });
        }
        warnings.push({ setting, message: `${setting} is ${String(settings[setting])}: on trn1 ${REASON}` });
      }
      return warnings;
    },
    createStaging: createNeuronStaging,
  };
}

/** The engine's own limit, else the model's. Errors: `KV_CONFIG_INVALID`. */
function maxModelLen(modelConfig: Readonly<Record<string, unknown>>): number {
  for (const key of ["max_model_len", "max_position_embeddings"]) {
    const value = modelConfig[key];
    if (value === undefined || value === null) continue;
    if (typeof value === "number" && Number.isSafeInteger(value) && value > 0) return value;
    throw new KvError(
      "KV_CONFIG_INVALID",
      `the model's config gives ${key} ${JSON.stringify(value)}, not a positive integer`,
    );
  }
  throw new KvError(
    "KV_CONFIG_INVALID",
    "the model's config gives neither max_model_len nor max_position_embeddings",
  );
}
