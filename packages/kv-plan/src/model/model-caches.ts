import type { KvCacheLayout } from "@kv/interface";
import { KvError } from "@kv/interface";
import {
  ARCHITECTURES,
  architectureOf,
  familyOfRule,
  type LearnedArchitecture,
  type Part,
  partsOf,
} from "./architectures.js";
import { blockSizesOf, layersOf } from "./block-sizes.js";
import { modelDtypeOf, refuseQuantization, resolvedCacheDtype } from "./cache-dtype.js";
import { ConfigFields, isRecord } from "./config-fields.js";
import {
  besideTarget,
  type DraftModel,
  HEAD_LAYERS,
  methodOf,
  predictionLayers,
} from "./draft-layers.js";
import { type CacheGroup, groupLayers, type LayerCache } from "./kv-cache-groups.js";
import { bytesPerBlock } from "./kv-cache-tensors.js";
import { divided, FLASH_ATTN, type ModelContext, type ModelDraft } from "./model-draft.js";

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
  /** vLLM's `VLLM_KV_CACHE_LAYOUT`. Default: the backends' first choice. */
  readonly layout?: KvCacheLayout | undefined;
  /** What guesses tokens beside the model. */
  readonly draft?: DraftModel | undefined;
}

/** One rank's caches as vLLM 0.33 allocates them on an H100. */
export interface ModelCaches {
  readonly architecture: string;
  /** Family of rules, such as "dense attention". */
  readonly family: string;
  /** vLLM's `cache_dtype`; "auto" is `modelDtype`. */
  readonly cacheDtype: string;
  readonly modelDtype: string;
  readonly blockSize: number;
  /** Tokens between two states. */
  readonly stateBlockSize: number | undefined;
  readonly kernelBlockSize: number;
  /** The attention backend of most layers. */
  readonly backend: string;
  readonly layout: KvCacheLayout;
  readonly layers: readonly LayerCache[];
  readonly groups: readonly CacheGroup[];
  readonly numLayers: number;
  /** KV heads of the whole model; 1 for latents. */
  readonly numKvHeads: number;
  readonly bytesPerBlock: number;
  readonly notHandedOver: string | undefined;
  /** Sentences about what is guessed. */
  readonly assumed: readonly string[];
}

/**
 * `given`: what was learned of the config's architecture, instead of the table's entry.
 * @throws `KV_CONFIG_INVALID` with the field; `KV_PLAN_UNSUPPORTED` for an unknown architecture or
 * field, and for a TP size that vLLM refuses.
 */
export function modelCaches(
  name: string,
  config: unknown,
  settings: CacheSettings,
  given?: LearnedArchitecture,
): ModelCaches {
  const model = readModel(name, config, settings, given);
  const { context, learned } = model;
  const whole = settings.draft === undefined ? model.draft : withDraft(model, config, settings);
  return cachesOfDraft(context, whole, {
    family: model.family,
    blockSize: settings.blockSize,
    layout: settings.layout ?? learned.layout,
    maxTokens: maxTokensOf(context.fields),
  });
}

interface ReadModel {
  readonly context: ModelContext;
  readonly learned: LearnedArchitecture;
  readonly family: string;
  readonly draft: ModelDraft;
}

/** `target`: the model beside which it is served. */
function readModel(
  name: string,
  config: unknown,
  settings: CacheSettings,
  given?: LearnedArchitecture,
  target?: Pick<ModelContext, "modelDtype" | "cacheDtype">,
): ReadModel {
  if (!isRecord(config))
    throw new KvError("KV_CONFIG_INVALID", `${name}: the file: not an object`, {
      hint: "give the config.json of a decoder model from Hugging Face",
    });
  const outer = new ConfigFields(name, config);
  const { architecture, learned } = architectureOf(name, outer, given);
  const family = familyOfRule(learned);
  const parts = partsOf(config);
  const { path, fields } = parts.at(-1) as Part;
  const inner = path === "" ? outer : new ConfigFields(name, fields, path);
  const assumed: string[] = [];
  refuseQuantization(name, ARCHITECTURES.quantizations, outer, inner);
  const context: ModelContext = {
    name,
    architecture,
    outer,
    fields: inner,
    assumed,
    shapes: ARCHITECTURES.shapes,
    tpSize: settings.tpSize,
    modelDtype: modelDtypeOf(name, outer, inner, assumed),
    cacheDtype: resolvedCacheDtype(name, settings.cacheDtype ?? "auto", outer, inner),
    stateDtype: settings.stateDtype ?? "auto",
    prefixCaching: settings.prefixCaching ?? true,
    draftTokens: settings.draft?.tokens,
    ...(target && { modelDtype: target.modelDtype, cacheDtype: target.cacheDtype }),
  };
  inner.ignore(...TOWERS);
  for (const part of parts) for (const tower of TOWERS) divideTower(context, part.fields[tower]);
  if (learned.tp?.includes(settings.tpSize) === false)
    throw inner.unknownValue("TP", settings.tpSize, `${learned.tp.join(", ")} are known`);
  refuseUnlearned(inner, learned);
  const draft = withPrefix(family.read(context), learned.prefix);
  const types = inner.value("layer_types");
  if (Array.isArray(types) && types.length !== draft.numLayers)
    throw inner.unknownValue("layer_types", types, `the model has ${draft.numLayers} layers`);
  inner.ignore(...(learned.without ?? []));
  inner.refuseUnread(`${architecture} (${family.name})`);
  return { context, learned, family: family.name, draft };
}

/**
 * The model with its draft's layers.
 * @throws `KV_PLAN_UNSUPPORTED` for a draft that vLLM was not asked with.
 */
function withDraft(
  { context, learned, draft: target }: ReadModel,
  config: unknown,
  settings: CacheSettings,
): ModelDraft {
  const draft = settings.draft as DraftModel;
  if (methodOf(context, draft, learned) !== "mtp") {
    if ((target.cacheDtype ?? context.cacheDtype) !== context.cacheDtype)
      throw context.fields.unknownValue(
        "--kv-cache-dtype",
        context.cacheDtype,
        `the model's caches are of type ${target.cacheDtype}, which a head's attention does not take`,
      );
    const head = readModel(
      `${context.name}'s draft`,
      { ...(draft.config as object), architectures: [HEAD_LAYERS] },
      settings,
      ARCHITECTURES.architectures[HEAD_LAYERS],
      context,
    );
    return besideTarget(target, head.draft);
  }
  const count = predictionLayers(context, draft);
  const longer = { ...(config as object), num_hidden_layers: target.numLayers + count };
  return readModel(context.name, longer, settings, learned).draft;
}

/** Parts of a multimodal model, whose heads vLLM divides too. */
const TOWERS = ["vision_config", "audio_config", "encoder_config"];

function divideTower(context: ModelContext, tower: unknown): void {
  if (!isRecord(tower)) return;
  const { num_attention_heads: heads, num_heads: other } = tower;
  const count = heads ?? other;
  if (typeof count === "number") divided(context, count, "heads of an encoder");
}

/** @throws `KV_PLAN_UNSUPPORTED` for values that vLLM was not asked with. */
function refuseUnlearned(fields: ConfigFields, learned: LearnedArchitecture): void {
  const { only = {}, needs = [], notNull = [] } = learned;
  for (const field of notNull)
    if (fields.kindOf(field) === "null")
      throw fields.unknownValue(field, null, "vLLM refuses a null there");
  for (const field of needs)
    if (fields.kindOf(field) === null)
      throw fields.unknownValue(field, null, "vLLM refuses the model without it");
  for (const [field, values] of Object.entries(only)) {
    const value = fields.kindOf(field);
    if (!values.some((known) => JSON.stringify(known) === JSON.stringify(value)))
      throw fields.unknownValue(
        field,
        fields.value(field),
        `what vLLM does then is not known; ${values.map((known) => JSON.stringify(known)).join(", ")} are`,
      );
  }
}

function withPrefix(draft: ModelDraft, prefix: string | undefined): ModelDraft {
  if (prefix === undefined) return draft;
  const layers = draft.layers.map((each) => ({ ...each, name: prefix + each.name }));
  return { ...draft, layers };
}

/** @throws `KV_CONFIG_INVALID` for a block size that a kernel does not take. */
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
  const sizes = blockSizesOf(context, withWideBlocks(draft), given.blockSize, given.maxTokens);
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

/** FlashAttention's blocks are as large as its widest heads need. */
function withWideBlocks(draft: ModelDraft): ModelDraft {
  const tokens = draft.layers.map(({ spec }) =>
    "kernelBlock" in spec ? (spec.kernelBlock ?? 0) : 0,
  );
  const backends = draft.backends.map((backend) =>
    backend === FLASH_ATTN
      ? { ...backend, kernelTokens: Math.max(backend.kernelTokens, ...tokens) }
      : backend,
  );
  return { ...draft, backends };
}

/** A whole block, unless the kernel takes only one size. */
function kernelBlockSizeOf({ backends }: ModelDraft, blockSize: number): number {
  const only = backends
    .filter(({ only: isOnly }) => isOnly === true)
    .map(({ kernelTokens }) => kernelTokens);
  return Math.min(blockSize, ...only);
}

/** vLLM's `max_model_len` where a config names no longest sequence. */
export const DEFAULT_MAX_TOKENS = 2048;

/** vLLM's default `max_model_len`: the least of the fields for a longest sequence. */
function maxTokensOf(fields: ConfigFields): number {
  const names =
    "max_position_embeddings n_positions max_seq_len seq_length model_max_length max_target_positions max_sequence_length max_seq_length seq_len";
  const found = names.split(" ").flatMap((name) => {
    const value = fields.value(name);
    return typeof value === "number" ? [value] : [];
  });
  return found.length === 0 ? DEFAULT_MAX_TOKENS : Math.min(...found);
}
