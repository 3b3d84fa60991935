import type { MemoryType } from "./descriptors.js";
import { KvError } from "./errors.js";
import type { Staging, StagingOptions } from "./staging.js";

/** Capabilities of an accelerator. */
export interface PlatformCapabilities {
  /**
   * Memory types under which device memory can be registered. Empty: blocks are staged through host
   * memory.
   */
  readonly registersAs: readonly MemoryType[];
  /** Ways to register device memory that exist, but that this staging platform does not use. */
  readonly directRegistration?: readonly DirectRegistration[] | undefined;
  /** Values of vLLM's `kv_buffer_device`; the first is the default. */
  readonly bufferDevices: readonly string[];
  /** Batches that may execute at once; 1 is synchronous execution. */
  readonly maxConcurrentBatches: number;
}

/** A way to register device memory without staging. */
export interface DirectRegistration {
  /** Backend that supports it, such as "LIBFABRIC". */
  readonly backend: string;
  readonly memoryType: MemoryType;
  /** What the machine needs, as text for people. */
  readonly needs: string;
}

/** Settings of an engine, under these names or vLLM's. A platform ignores unknown keys. */
export interface PlatformEngineSettings {
  readonly prefixCaching?: boolean | undefined;
  readonly maxNumSeqs?: number | undefined;
  readonly modelConfig?: Readonly<Record<string, unknown>> | undefined;
  readonly [key: string]: unknown;
}

/** Settings whose names and types are known; undefined where not given. */
export interface KnownEngineSettings {
  readonly prefixCaching: boolean | undefined;
  readonly maxNumSeqs: number | undefined;
}

/**
 * Reads settings under our names and vLLM's, also those of its command line, `no-` included. Null
 * counts as absent.
 *
 * @throws `KV_CONFIG_INVALID` for a wrong type, and for two names that disagree.
 */
export function engineSettings(settings: PlatformEngineSettings): KnownEngineSettings {
  const maxNumSeqs = readSetting(settings, "maxNumSeqs", "max_num_seqs", "number");
  if (maxNumSeqs !== undefined && (!Number.isSafeInteger(maxNumSeqs) || maxNumSeqs < 1)) {
    throw new KvError("KV_CONFIG_INVALID", `maxNumSeqs is ${maxNumSeqs}, not a positive integer`);
  }
  return {
    prefixCaching: readSetting(settings, "prefixCaching", "enable_prefix_caching", "boolean"),
    maxNumSeqs,
  };
}

/**
 * Reads the longest sequence in tokens: vLLM's `max_model_len`, else the model's
 * `max_position_embeddings`.
 *
 * @throws `KV_CONFIG_INVALID` where both are missing, or it is not a positive integer.
 */
export function readMaxModelLen(modelConfig: Readonly<Record<string, unknown>>): number {
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

interface SettingTypes {
  readonly boolean: boolean;
  readonly number: number;
}

function readSetting<T extends keyof SettingTypes>(
  settings: PlatformEngineSettings,
  ours: string,
  vllms: string,
  type: T,
): SettingTypes[T] | undefined {
  let read: SettingTypes[T] | undefined;
  let readAs = ours;
  const option = vllms.replaceAll("_", "-");
  const negated = type === "boolean" ? [`no_${vllms}`, `no-${option}`] : [];
  for (const name of [ours, vllms, option, ...negated]) {
    const given = settings[name] ?? undefined;
    if (given === undefined) continue;
    if (typeof given !== type) {
      throw new KvError("KV_CONFIG_INVALID", `${name} is ${JSON.stringify(given)}, not a ${type}`);
    }
    const value = (negated.includes(name) ? !given : given) as SettingTypes[T];
    if (read !== undefined && read !== value) {
      throw new KvError(
        "KV_CONFIG_INVALID",
        `${readAs} is ${String(settings[readAs])} and ${name} is ${String(given)}`,
        { hint: "give one of the two names" },
      );
    }
    read = value;
    readAs = name;
  }
  return read;
}

/** A setting that works worse than it could. */
export interface PlatformWarning {
  readonly setting: string;
  readonly message: string;
}

/**
 * Describes an accelerator to an engine: cache shape, limits of settings, and how memory is
 * registered or staged (vLLM: `vllm.platforms.Platform`). Every implementation runs the suite
 * `@kv/conformance/platform`.
 */
export interface Platform {
  /** A name such as "cpu", "cuda" or "neuron". */
  readonly deviceType: string;
  readonly capabilities: PlatformCapabilities;
  /**
   * Returns the dimensions of one layer's cache, outermost first (vLLM:
   * `AttentionBackend.get_kv_cache_shape`).
   */
  kvCacheShape(shape: KvCacheShapeOptions): readonly number[];
  /**
   * Returns the longest sequence in tokens.
   *
   * @throws `KV_CONFIG_INVALID`, `KV_MODEL_UNSUPPORTED`.
   */
  maxModelLen(modelConfig: Readonly<Record<string, unknown>>): number;
  /**
   * Checks an engine's settings before it starts; returns warnings for those that work badly.
   *
   * @throws `KV_PLATFORM_UNSUPPORTED` for a setting that cannot work, with the reason.
   */
  check(settings: PlatformEngineSettings): readonly PlatformWarning[];
  /**
   * Creates the staging pool, required where `capabilities.registersAs` is empty. `staged` of
   * `@kv/connector` calls it once per rank and closes the result.
   *
   * @throws `KV_PLATFORM_UNSUPPORTED` for caches that this platform cannot stage.
   */
  createStaging?(options: StagingOptions): Promise<Staging>;
}

/** Dimensions of a KV cache. */
export interface KvCacheShapeOptions {
  readonly numBlocks: number;
  readonly blockSize: number;
  readonly numKvHeads: number;
  /** Elements of K, or of V, of one head and token. */
  readonly headSize: number;
  /** Further dimensions; a platform ignores unknown ones. */
  readonly [key: string]: unknown;
}
