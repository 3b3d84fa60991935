import type { KvCacheLayout } from "@kv/interface";
import { KvError } from "@kv/interface";
import { familyOf } from "./architectures.js";
import { blockSizesOf, layersOf } from "./block-sizes.js";
import { modelDtypeOf, resolvedCacheDtype } from "./cache-dtype.js";
import { ConfigFields, isRecord } from "./config-fields.js";
import { type CacheGroup, groupLayers, type LayerCache } from "./kv-cache-groups.js";
import { bytesPerBlock } from "./kv-cache-tensors.js";
import type { ModelContext, ModelDraft } from "./model-draft.js";

/** The settings of an engine that decide the caches of its model. */
export interface CacheSettings {
  readonly tpSize: number;
  /** vLLM's `--kv-cache-dtype`. Default "auto". */
  readonly cacheDtype?: string | undefined;
  /** vLLM's `--mamba-ssm-cache-dtype`. Default "auto". */
  readonly stateDtype?: string | undefined;
  /** vLLM's `--enable-prefix-caching`. Default true, as in vLLM. */
  readonly prefixCaching?: boolean | undefined;
  /** vLLM's `--block-size`. */
  readonly blockSize?: number | undefined;
  /** vLLM's `VLLM_KV_CACHE_LAYOUT`. Default: the one that the backends want first. */
  readonly layout?: KvCacheLayout | undefined;
}

/** The KV caches of a model on one rank, as vLLM 0.33 allocates them on an H100. */
export interface ModelCaches {
  readonly architecture: string;
  /** The family of rules, such as "dense attention". */
  readonly family: string;
  /** vLLM's `cache_dtype`; "auto" is `modelDtype`. */
  readonly cacheDtype: string;
  readonly modelDtype: string;
  readonly blockSize: number;
  /** Tokens between two states, of models with states. */
  readonly stateBlockSize: number | undefined;
  /** Tokens in a kernel block. */
  readonly kernelBlockSize: number;
  /** The attention backend of most layers. */
  readonly backend: string;
  readonly layout: KvCacheLayout;
  readonly layers: readonly LayerCache[];
  readonly groups: readonly CacheGroup[];
  /** All layers of the model, with and without a cache. */
  readonly numLayers: number;
  /** KV heads of the whole model; 1 for latents. */
  readonly numKvHeads: number;
  /** Bytes of one block id. */
  readonly bytesPerBlock: number;
  readonly notHandedOver: string | undefined;
  /** Guesses among these, as sentences. */
  readonly assumed: readonly string[];
}

/**
 * The KV caches of the model of a `config.json`.
 * @throws `KV_CONFIG_INVALID` with the field; `KV_PLAN_UNSUPPORTED` for an architecture or a field
 * that the rules do not know, and for a TP size that vLLM refuses.
 */
export function modelCaches(name: string, config: unknown, settings: CacheSettings): ModelCaches {
  if (!isRecord(config))
    throw new KvError("KV_CONFIG_INVALID", `${name}: the file: not an object`, {
      hint: "give the config.json of a decoder model from Hugging Face",
    });
  const outer = new ConfigFields(name, config);
  const { architecture, family, textField } = familyOf(name, outer);
  const inner = textField === undefined ? outer : (outer.object(textField) ?? outer);
  const assumed: string[] = [];
  const context: ModelContext = {
    name,
    architecture,
    outer,
    fields: inner,
    assumed,
    tpSize: settings.tpSize,
    modelDtype: modelDtypeOf(name, outer, inner, assumed),
    cacheDtype: resolvedCacheDtype(name, settings.cacheDtype ?? "auto", outer, inner),
    stateDtype: settings.stateDtype ?? "auto",
    prefixCaching: settings.prefixCaching ?? true,
  };
  const draft = family.read(context);
  inner.refuseUnread(`${architecture} (${family.name})`);
  return cachesOfDraft(context, draft, {
    family: family.name,
    blockSize: settings.blockSize,
    layout: settings.layout,
    maxTokens: maxTokensOf(inner),
  });
}

/**
 * The caches of a draft, with block sizes and groups.
 * @throws `KV_CONFIG_INVALID` for a block size that a kernel does not take.
 */
export function cachesOfDraft(
  context: Omit<ModelContext, "fields" | "outer">,
  draft: ModelDraft,
  given: {
    readonly family: string;
    readonly blockSize: number | undefined;
    readonly layout: KvCacheLayout | undefined;
    readonly maxTokens: number;
  },
): ModelCaches {
  const sizes = blockSizesOf(context, draft, given.blockSize, given.maxTokens);
  const layers = layersOf(draft, sizes);
  const layout = given.layout ?? draft.layout ?? "LBHNC";
  const groups = groupLayers(layers, layout);
  const { architecture, assumed } = context;
  return {
    architecture,
    layout,
    layers,
    groups,
    assumed,
    family: given.family,
    cacheDtype: draft.cacheDtype ?? context.cacheDtype,
    modelDtype: context.modelDtype,
    blockSize: sizes.blockSize,
    stateBlockSize: sizes.stateBlockSize,
    kernelBlockSize: kernelBlockSizeOf(draft, sizes.blockSize),
    backend: draft.backends.at(-1)?.name ?? "none",
    numLayers: draft.numLayers,
    numKvHeads: draft.numKvHeads,
    bytesPerBlock: bytesPerBlock(groups, layout),
    notHandedOver: draft.notHandedOver,
  };
}

/** Tokens in a kernel block: a whole block, unless the kernel takes blocks of one size only. */
function kernelBlockSizeOf({ backends }: ModelDraft, blockSize: number): number {
  const only = backends
    .filter(({ only: isOnly }) => isOnly === true)
    .map(({ kernelTokens }) => kernelTokens);
  return Math.min(blockSize, ...only);
}

/** vLLM's `max_model_len` where a config names no longest sequence. */
export const DEFAULT_MAX_TOKENS = 2048;

/** vLLM's `max_model_len` by default: the least of the fields that name a longest sequence. */
function maxTokensOf(fields: ConfigFields): number {
  const names =
    "max_position_embeddings n_positions max_seq_len seq_length model_max_length max_target_positions max_sequence_length max_seq_length seq_len";
  const found = names.split(" ").flatMap((name) => {
    const value = fields.value(name);
    return typeof value === "number" ? [value] : [];
  });
  return found.length === 0 ? DEFAULT_MAX_TOKENS : Math.min(...found);
}
