import { compatibilityHash } from "@kv/protocol";
import { expect, test } from "vitest";
import { FACTORS, METADATA } from "../../test/sample-recording.js";
import { reproduceHash } from "./reproduce-hash.js";

const clues = {
  vllmVersion: "0.33.0",
  models: ["tiny-qwen3"],
  metadata: METADATA,
  tpSize: 1,
  cacheDtype: "auto",
  transferMode: "pull",
  given: {},
};

test("the factors are found from what a server tells", () => {
  expect(reproduceHash(compatibilityHash(FACTORS), clues).factors).toEqual(FACTORS);
});

test.each([
  ["a build's own version", { vllm_version: "0.33.0+cpu" }, {}],
  [
    "fp8 in a bfloat16 model",
    { dtype: "torch.bfloat16", cache_dtype: "fp8", head_size: 128 },
    { cacheDtype: "fp8" },
  ],
  ["heads of four ranks", { num_kv_heads: 16 }, { tpSize: 4 }],
  [
    "a hub name for a path of its cache",
    { model: "Qwen/Qwen3" },
    { models: ["/c/models--Qwen--Qwen3/snapshots/x"] },
  ],
  ["a factor that only the user knows", { num_hidden_layers: 61 }, { given: { num_hidden_layers: 61 } }],
])("%s", (_, changed, more) => {
  const factors = { ...FACTORS, ...changed };
  expect(reproduceHash(compatibilityHash(factors), { ...clues, ...more }).factors).toEqual(factors);
});

test("what cannot be found ends, and says how much was tried", () => {
  const { factors, tried } = reproduceHash("0".repeat(64), clues);
  expect(factors).toBeUndefined();
  expect(tried).toBeGreaterThan(100);
});
