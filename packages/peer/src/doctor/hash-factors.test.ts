import { compatibilityHash, VLLM_VERSIONS } from "@kv/protocol";
import { expect, test } from "vitest";
import { FACTORS, METADATA } from "../../test/sample-recording.js";
import { findHashFactors } from "./hash-factors.js";

const clues = {
  vllmVersion: "0.33.0",
  models: ["tiny-qwen3"],
  metadata: METADATA,
  versions: VLLM_VERSIONS.slice(-2),
  tpSize: 1,
  cacheDtype: "auto",
  transferMode: "pull",
  knownFactors: {},
};

test("finds the hash factors from what a server reports", () => {
  expect(findHashFactors(compatibilityHash(FACTORS), clues).factors).toEqual(FACTORS);
});

test.each([
  ["a version with a local part", { vllm_version: "0.33.0+cpu" }, {}],
  [
    "fp8 in a bfloat16 model",
    { dtype: "torch.bfloat16", cache_dtype: "fp8", head_size: 128 },
    { cacheDtype: "fp8" },
  ],
  ["KV heads of four ranks", { num_kv_heads: 16 }, { tpSize: 4 }],
  [
    "a Hub name from a path of the Hub cache",
    { model: "Qwen/Qwen3" },
    { models: ["/c/models--Qwen--Qwen3/snapshots/x"] },
  ],
  ["a factor that the user gave", { num_hidden_layers: 61 }, { knownFactors: { num_hidden_layers: 61 } }],
])("finds the factors: %s", (_, changed, more) => {
  const factors = { ...FACTORS, ...changed };
  expect(findHashFactors(compatibilityHash(factors), { ...clues, ...more }).factors).toEqual(factors);
});

test("a search without a result ends with the number of tried combinations", () => {
  const { factors, tried } = findHashFactors("0".repeat(64), clues);
  expect(factors).toBeUndefined();
  expect(tried).toBeGreaterThan(100);
});
