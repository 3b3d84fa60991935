import { writeFile } from "node:fs/promises";
import { join } from "node:path";
import { seededRandom } from "@kv/transport-memory";
import { buildOnnx } from "./onnx/build-onnx.js";
import { type DecoderConfig, readDecoderConfig } from "./weights/decoder-config.js";
import { makeWeights, type Weights } from "./weights/weights.js";

export const tinyModelName = "tiny-qwen3";

/**
 * The `config.json` of the demo's model: 2.9 million random weights in the shape of Qwen3, and
 * words `t0` to `t1023`.
 */
export function tinyModelConfig(kvHeads = 4) {
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
    max_position_embeddings: 2048,
    rope_parameters: { rope_theta: 10_000, rope_type: "default" },
    rms_norm_eps: 1e-6,
    tie_word_embeddings: false,
    bos_token_id: 1,
    eos_token_id: 2,
    pad_token_id: 0,
    hidden_act: "silu",
    dtype: "float32",
  };
}

// Tokens 3 to 5 open a user's turn, any other turn and the answer.
const chatTemplate =
  "{% for message in messages %}{{ 't3 ' if message['role'] == 'user' else 't4 ' }}{{ message['content'] }} {% endfor %}" +
  "{% if add_generation_prompt %}t5{% endif %}";

export async function writeTinyModel(directory: string, kvHeads: number): Promise<void> {
  const json = tinyModelConfig(kvHeads);
  const config = readDecoderConfig(json, tinyModelName);
  await buildOnnx({ config, weights: tinyWeights(config), directory });
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

/** With so large a deviation, the next token follows from the whole prompt. */
const DEVIATION = 0.08;

/** Normal weights, the same in every run. */
function tinyWeights(config: DecoderConfig): Weights {
  return makeWeights(config, (name, [rows, columns]) => {
    const { next } = seededRandom(name);
    return Float32Array.from({ length: rows * columns }, () => {
      const radius = Math.sqrt(-2 * Math.log(1 - next()));
      return DEVIATION * radius * Math.cos(2 * Math.PI * next());
    });
  });
}
