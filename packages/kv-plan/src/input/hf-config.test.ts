import { expect, test } from "vitest";
import { modelFromHfConfig } from "./hf-config.js";

const base = {
  num_hidden_layers: 4,
  num_attention_heads: 8,
  num_key_value_heads: 2,
  head_dim: 16,
  dtype: "bfloat16",
};

test("a hybrid's plan has its attention layers, and lists the left-out states as assumed", () => {
  const model = modelFromHfConfig("hybrid", { ...base, hybrid_override_pattern: "M*-M" });
  expect(model.layers.map(({ name }) => name)).toEqual(["model.layers.1.self_attn.attn"]);
  expect(model.assumed.join()).toContain("the states of 2 state-space layers are left out");
});

test("layer_types mark state-space layers too", () => {
  const layer_types = ["linear_attention", "linear_attention", "linear_attention", "full_attention"];
  const model = modelFromHfConfig("next", { ...base, layer_types });
  expect(model.layers.map(({ name }) => name)).toEqual(["model.layers.3.self_attn.attn"]);
  expect(model.assumed.join()).toContain("the states of 3 state-space layers are left out");
});

test("an attention-only model keeps all its layers and assumes nothing", () => {
  const layer_types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"];
  const model = modelFromHfConfig("gemma", { ...base, layer_types, sliding_window: 128 });
  expect(model.layers.map(({ kind }) => kind)).toEqual(["swa", "full", "swa", "full"]);
  expect(model.assumed).toEqual([]);
});
