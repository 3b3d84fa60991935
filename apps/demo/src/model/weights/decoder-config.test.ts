import { expect, test } from "vitest";
import { tinyModelConfig } from "../prepare-model.js";
import { readDecoderConfig } from "./decoder-config.js";

const where = "config.json";

test("reads both forms of the rotary parameters", () => {
  const { rope_parameters: _, ...older } = tinyModelConfig();
  expect(readDecoderConfig({ ...older, rope_theta: 5e5 }, where).ropeTheta).toBe(5e5);
  expect(readDecoderConfig(tinyModelConfig(), where)).toMatchObject({
    ropeTheta: 10_000,
    heads: 8,
    kvHeads: 4,
    headDim: 32,
  });
});

test("head_dim and num_key_value_heads have the defaults of Hugging Face", () => {
  const json = { ...tinyModelConfig(), head_dim: null, num_key_value_heads: undefined };
  expect(readDecoderConfig(json, where)).toMatchObject({ headDim: 32, kvHeads: 8 });
});

test.each<[object, string, RegExp]>([
  [{ model_type: "gemma3" }, "KV_MODEL_UNSUPPORTED", /gemma3/],
  [{ rope_scaling: { rope_type: "yarn" } }, "KV_MODEL_UNSUPPORTED", /yarn/],
  [{ rope_parameters: { rope_type: "llama3" } }, "KV_MODEL_UNSUPPORTED", /llama3/],
  [{ hidden_act: "gelu" }, "KV_MODEL_UNSUPPORTED", /gelu/],
  [{ sliding_window: 4096 }, "KV_MODEL_UNSUPPORTED", /4096/],
  [{ num_key_value_heads: 3 }, "KV_CONFIG_INVALID", /8 .* 3/],
  [{ head_dim: 33 }, "KV_CONFIG_INVALID", /33/],
  [{ vocab_size: -1 }, "KV_CONFIG_INVALID", /vocab_size/],
  [{ num_hidden_layers: "4" }, "KV_CONFIG_INVALID", /num_hidden_layers/],
])("refuses %j", (change, code, message) => {
  expect(() => readDecoderConfig({ ...tinyModelConfig(), ...change }, where)).toThrow(
    expect.objectContaining({ code, message: expect.stringMatching(message) }),
  );
});
