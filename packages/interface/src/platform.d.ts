import type { MemoryType } from "./descriptors.js";
import type { Staging, StagingOptions } from "./staging.js";
/** Capabilities of an accelerator. */
export interface PlatformCapabilities {
    /**
     * Memory types under which the device's memory can be registered. Empty: blocks must be staged
     * through host memory.
     */
    readonly registersAs: readonly MemoryType[];
    /**
     * Ways to register the device's memory directly that exist but that this platform does not use,
     * because it stages. Absent: none is known.
     */
    readonly directRegistration?: readonly DirectRegistration[] | undefined;
    /** Values of vLLM's `kv_buffer_device` that work here. The first one is the default. */
    readonly bufferDevices: readonly string[];
    /** Batches that may execute at the same time; 1 means synchronous execution. */
    readonly maxConcurrentBatches: number;
}
/** A way to register a device's memory without staging. */
export interface DirectRegistration {
    /** Name of the backend that supports it, such as "LIBFABRIC". */
    readonly backend: string;
    /** Memory type under which the backend registers the memory. */
    readonly memoryType: MemoryType;
    /** Requirements of the machine, as text for people. */
    readonly needs: string;
}
/**
 * Settings of an engine that a platform may refuse. vLLM's own names are read as well;
 * `engineSettings` merges both. A platform ignores keys that it does not know.
 */
export interface PlatformEngineSettings {
    /** Whether prefix caching is on (vLLM: `enable_prefix_caching`). */
    readonly prefixCaching?: boolean | undefined;
    /** Sequences that the engine runs at the same time (vLLM: `max_num_seqs`). */
    readonly maxNumSeqs?: number | undefined;
    /** The model's `config.json`. */
    readonly modelConfig?: Readonly<Record<string, unknown>> | undefined;
    /** Further settings of the engine. */
    readonly [key: string]: unknown;
}
/** Settings whose names and types are known. */
export interface KnownEngineSettings {
    /**
     * `prefixCaching` or `enable_prefix_caching`, also as on vLLM's command line; undefined when none
     * is given.
     */
    readonly prefixCaching: boolean | undefined;
    /**
     * `maxNumSeqs` or `max_num_seqs`, also as on vLLM's command line; undefined when none is given.
     */
    readonly maxNumSeqs: number | undefined;
}
/**
 * Reads an engine's settings under our names and under vLLM's. An undefined or null value counts as
 * absent. Errors: `KV_CONFIG_INVALID` for a value of the wrong type, and for two names of one
 * setting with different values.
 */
export declare function engineSettings(settings: PlatformEngineSettings): KnownEngineSettings;
/**
 * Reads the longest sequence in tokens: `max_model_len`, as vLLM's engine arguments limit it, else
 * the model's `max_position_embeddings`. Errors: `KV_CONFIG_INVALID` where both are missing, or the
 * value is not a positive integer.
 */
export declare function readMaxModelLen(modelConfig: Readonly<Record<string, unknown>>): number;
/** A setting that works worse than it could. */
export interface PlatformWarning {
    /** Name of the setting. */
    readonly setting: string;
    /** Reason, as text for people. */
    readonly message: string;
}
/**
 * A Platform describes an accelerator to an engine: the shape of its cache, the limits of its
 * settings, whether its memory can be registered, and, where it cannot, how blocks are staged
 * through host memory. The worker side of a connector receives it as an option. Every
 * implementation runs the suite `@kv/conformance/platform`. vLLM's counterpart is
 * `vllm.platforms.Platform`.
 */
export interface Platform {
    /** Name of the device type in lower case: "cpu", "cuda", "neuron", … */
    readonly deviceType: string;
    /** What this platform can do. */
    readonly capabilities: PlatformCapabilities;
    /**
     * Returns the dimensions of one layer's cache, outermost first (vLLM:
     * `AttentionBackend.get_kv_cache_shape`). Unknown keys are ignored.
     */
    kvCacheShape(shape: KvCacheShapeOptions): readonly number[];
    /**
     * Returns the longest sequence in tokens from the model's config. Errors: `KV_CONFIG_INVALID`,
     * `KV_MODEL_UNSUPPORTED`.
     */
    maxModelLen(modelConfig: Readonly<Record<string, unknown>>): number;
    /**
     * Checks an engine's settings before it starts. Returns warnings for settings that work badly.
     * Errors: `KV_PLATFORM_UNSUPPORTED`, with the setting and the reason, for a setting that cannot
     * work.
     */
    check(settings: PlatformEngineSettings): readonly PlatformWarning[];
    /**
     * Creates the staging pool. Absent where the device's memory is registered directly; required
     * where `capabilities.registersAs` is empty. `staged` of `@kv/connector` calls it once for each
     * rank and closes what it returns. Errors: `KV_PLATFORM_UNSUPPORTED` for caches that this
     * platform cannot stage.
     */
    createStaging?(options: StagingOptions): Promise<Staging>;
}
/** Dimensions of a KV cache. */
export interface KvCacheShapeOptions {
    /** Blocks of the cache. */
    readonly numBlocks: number;
    /** Tokens of a block. */
    readonly blockSize: number;
    /** KV heads of this rank. */
    readonly numKvHeads: number;
    /** Elements of K, or of V, of one head and token. */
    readonly headSize: number;
    /** Further dimensions; a platform ignores those that it does not know. */
    readonly [key: string]: unknown;
}
