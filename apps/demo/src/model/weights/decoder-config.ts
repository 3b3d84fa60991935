import { KvError } from "@kv/interface";
import { z } from "zod";

/**
 * The decoders that `buildOnnx` writes: RMSNorm, rotary embedding, grouped-query attention, SwiGLU.
 */
const buildableModelTypes = ["qwen3", "qwen2", "llama", "mistral"] as const;

/**
 * The fields of a Hugging Face `config.json` that `buildOnnx` and `seededWeights` use, under
 * shorter names.
 */
export interface DecoderConfig {
  modelType: (typeof buildableModelTypes)[number];
  vocabSize: number;
  hiddenSize: number;
  intermediateSize: number;
  layers: number;
  heads: number;
  kvHeads: number;
  headDim: number;
  ropeTheta: number;
  rmsNormEps: number;
  tieWordEmbeddings: boolean;
  initializerRange: number;
  padTokenId: number | undefined;
}

const count = z.number().int().positive().max(1_048_576);

const rope = z
  .looseObject({
    rope_type: z.string().optional(),
    type: z.string().optional(),
    rope_theta: z.number().positive().optional(),
  })
  .nullish();

const schema = z.looseObject({
  model_type: z.string(),
  vocab_size: z.number().int().positive().max(16_777_216),
  hidden_size: count,
  intermediate_size: count,
  num_hidden_layers: z.number().int().positive().max(1024),
  num_attention_heads: count,
  num_key_value_heads: count.nullish(),
  head_dim: count.nullish(),
  rms_norm_eps: z.number().positive(),
  rope_theta: z.number().positive().optional(),
  rope_parameters: rope,
  rope_scaling: rope,
  hidden_act: z.string().default("silu"),
  sliding_window: z.number().nullish(),
  use_sliding_window: z.boolean().optional(),
  tie_word_embeddings: z.boolean().default(false),
  initializer_range: z.number().positive().default(0.02),
  pad_token_id: z.number().int().nonnegative().nullish(),
});

/**
 * Reads the JSON of a Hugging Face `config.json` (transformers 4 and 5 forms of the rotary
 * parameters).
 *
 * @throws KvError KV_CONFIG_INVALID where a value is missing or out of range, KV_MODEL_UNSUPPORTED
 * where the model
 *   is one that `buildOnnx` cannot write (another architecture, scaled rotary embedding, sliding windows).
 */
export function readDecoderConfig(json: unknown, { where }: { where: string }): DecoderConfig {
  const parsed = schema.safeParse(json);
  if (!parsed.success) {
    throw new KvError("KV_CONFIG_INVALID", `${where}: ${z.prettifyError(parsed.error)}`);
  }
  const config = parsed.data;
  const unsupported = (message: string, hint: string): KvError =>
    new KvError("KV_MODEL_UNSUPPORTED", `${where}: ${message}`, { hint });
  const exportHint =
    "export it with Hugging Face optimum (model.onnx with past_key_values) and give that directory";

  const modelType = buildableModelTypes.find((type) => type === config.model_type);
  if (modelType === undefined) {
    throw unsupported(
      `model_type ${config.model_type} is not one of ${buildableModelTypes.join(", ")}`,
      exportHint,
    );
  }
  const ropeType = [config.rope_parameters, config.rope_scaling]
    .map((value) => value?.rope_type ?? value?.type)
    .find((type) => type !== undefined && type !== "default");
  if (ropeType !== undefined)
    throw unsupported(`rotary embedding of type ${ropeType}, not default`, exportHint);
  if (config.hidden_act !== "silu")
    throw unsupported(`hidden_act ${config.hidden_act}, not silu`, exportHint);
  const window = config.sliding_window ?? undefined;
  if (window !== undefined && config.use_sliding_window !== false) {
    throw unsupported(`sliding_window ${window}; only full attention is built`, exportHint);
  }
  const heads = config.num_attention_heads;
  const kvHeads = config.num_key_value_heads ?? heads;
  if (heads % kvHeads !== 0) {
    throw new KvError(
      "KV_CONFIG_INVALID",
      `${where}: num_attention_heads ${heads} is not a multiple of num_key_value_heads ${kvHeads}`,
    );
  }
  const headDim = config.head_dim ?? config.hidden_size / heads;
  if (!Number.isInteger(headDim) || headDim % 2 !== 0) {
    throw new KvError("KV_CONFIG_INVALID", `${where}: head_dim ${headDim} is not an even integer`);
  }
  return {
    modelType,
    vocabSize: config.vocab_size,
    hiddenSize: config.hidden_size,
    intermediateSize: config.intermediate_size,
    layers: config.num_hidden_layers,
    heads,
    kvHeads,
    headDim,
    ropeTheta: config.rope_parameters?.rope_theta ?? config.rope_theta ?? 10_000,
    rmsNormEps: config.rms_norm_eps,
    tieWordEmbeddings: config.tie_word_embeddings,
    initializerRange: config.initializer_range,
    padTokenId: config.pad_token_id ?? undefined,
  };
}
