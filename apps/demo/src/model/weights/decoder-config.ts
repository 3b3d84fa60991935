import { KvError } from "@kv/interface";
import { z } from "zod";

/**
 * The decoders that `buildOnnx` writes: RMSNorm, rotary embedding, grouped-query attention, SwiGLU.
 */
const buildableModelTypes = ["qwen3", "qwen2", "llama", "mistral"];

/** The fields of a Hugging Face `config.json` that `buildOnnx` uses, under shorter names. */
export type DecoderConfig = ReturnType<typeof readDecoderConfig>;

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
});

/**
 * Of transformers 4 and 5.
 * @throws `KV_CONFIG_INVALID` where a value is missing or out of range, `KV_MODEL_UNSUPPORTED`
 * where the model is one that `buildOnnx` cannot write.
 */
export function readDecoderConfig(json: unknown, where: string) {
  const parsed = schema.safeParse(json);
  const invalid = (message: string) => new KvError("KV_CONFIG_INVALID", `${where}: ${message}`);
  if (!parsed.success) throw invalid(z.prettifyError(parsed.error));
  const config = parsed.data;
  const { model_type: modelType, hidden_act: activation, sliding_window: window } = config;
  const ropeType = [config.rope_parameters, config.rope_scaling]
    .map((value) => value?.rope_type ?? value?.type)
    .find((type) => type !== undefined && type !== "default");
  let unsupported: string | undefined;
  if (!buildableModelTypes.includes(modelType))
    unsupported = `model_type ${modelType} is not one of ${buildableModelTypes.join(", ")}`;
  else if (ropeType !== undefined)
    unsupported = `rotary embedding of type ${ropeType}, not default`;
  else if (activation !== "silu") unsupported = `hidden_act ${activation}, not silu`;
  else if (window != null && config.use_sliding_window !== false)
    unsupported = `sliding_window ${window}; only full attention is built`;
  if (unsupported !== undefined) {
    throw new KvError("KV_MODEL_UNSUPPORTED", `${where}: ${unsupported}`, {
      hint: "export it with Hugging Face optimum (model.onnx with past_key_values) and give that directory",
    });
  }
  const heads = config.num_attention_heads;
  const kvHeads = config.num_key_value_heads ?? heads;
  if (heads % kvHeads !== 0)
    throw invalid(
      `num_attention_heads ${heads} is not a multiple of num_key_value_heads ${kvHeads}`,
    );
  const headDim = config.head_dim ?? config.hidden_size / heads;
  if (!Number.isInteger(headDim) || headDim % 2 !== 0)
    throw invalid(`head_dim ${headDim} is not an even integer`);
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
  };
}
