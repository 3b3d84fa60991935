import { writeFile } from "node:fs/promises";
import { join } from "node:path";
import { buildOnnx } from "./onnx/build-onnx.js";
import { readDecoderConfig } from "./weights/decoder-config.js";
import { seededWeights } from "./weights/seeded-weights.js";

export const tinyModelName = "tiny-qwen3";
const seed = 1234;

interface TinyModelOptions {
  readonly kvHeads?: number;
  readonly maxModelLen?: number;
}

/**
 * The `config.json` of the demo's model: 2.9 million random weights in the shape of Qwen3, and
 * words `t0` to `t1023`.
 */
export function tinyModelConfig({
  kvHeads = 4,
  maxModelLen = 2048,
}: TinyModelOptions = {}): Record<string, unknown> {
  return {
    architectures: ["Qwen3ForCausalLM"],
    model_type: "qwen3",
    vocab_size: 1024,
    hidden_size: 256,
    intermediate_size: 512,
    num_hidden_layers: 4,
    num_attention_heads: 8,
    num_key_value_heads: kvHeads,
    head_dim: 32,
    max_position_embeddings: maxModelLen,
    rope_parameters: { rope_theta: 10_000, rope_type: "default" },
    rms_norm_eps: 1e-6,
    tie_word_embeddings: false,
    initializer_range: 0.08,
    bos_token_id: 1,
    eos_token_id: 2,
    pad_token_id: 0,
    attention_bias: false,
    hidden_act: "silu",
    sliding_window: null,
    dtype: "float32",
  };
}

// Tokens 3 to 5 open a user's turn, any other turn and the answer; nothing was trained, so any
// would do.
const chatTemplate =
  "{% for message in messages %}{{ 't3 ' if message['role'] == 'user' else 't4 ' }}{{ message['content'] }} {% endfor %}" +
  "{% if add_generation_prompt %}t5{% endif %}";

/**
 * Writes the demo's model as a directory: config.json, tokenizer_config.json, model.onnx and its
 * data.
 */
export async function writeTinyModel(
  directory: string,
  options: TinyModelOptions = {},
): Promise<void> {
  const json = tinyModelConfig(options);
  const config = readDecoderConfig(json, { where: tinyModelName });
  await buildOnnx({ config, weights: seededWeights(config, { seed }), directory });
  await writeFile(join(directory, "config.json"), JSON.stringify(json, null, 2));
  const tokenizer = {
    tokenizer_class: "NumberedWordTokenizer",
    bos_token: "t1",
    eos_token: "t2",
    pad_token: "t0",
    unk_token: "t0",
    chat_template: chatTemplate,
  };
  await writeFile(join(directory, "tokenizer_config.json"), JSON.stringify(tokenizer, null, 2));
}
