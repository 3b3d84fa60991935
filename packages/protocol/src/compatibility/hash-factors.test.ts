import { readFileSync } from "node:fs";
import { isLongRun } from "@kv/testing/long-run";
import { expect, test } from "vitest";
import {
  compatibilityHash,
  decodeAgentMetadata,
  decodeHandshakeReply,
  VLLM_VERSIONS,
} from "../index.js";
import { findHashFactors, searchHashFactors } from "./hash-factors.js";

/** A handshake of a real vLLM 0.33 prefill server with TP 1: 4 regions, blocks of 32 tokens. */
const reply = ["rep0", "rep1"].map((name) => {
  const file = new URL(
    `../../fixtures/wire/handshake/v33_pull_p1.pp0tp0.${name}.bin`,
    import.meta.url,
  );
  return new Uint8Array(readFileSync(file));
});
const METADATA = decodeAgentMetadata(decodeHandshakeReply(reply).payload.agentMetadataBytes);

const FACTORS = {
  attn_backend_name: "CPU_ATTN",
  cache_dtype: "auto",
  dtype: "torch.float32",
  head_size: 32,
  is_hma_enabled: true,
  model: "tiny-qwen3",
  nixl_connector_version: 15,
  num_hidden_layers: 4,
  num_kv_heads: 4,
  speculative_config: null,
  transfer_mode: "pull",
  vllm_version: "0.33.0",
};

/** As vLLM hashes the model's own MTP layers. */
const MTP = {
  auxiliary_layer_ids: null,
  code_revision: null,
  kv_cache_dtype: "auto",
  method: "mtp",
  model: "tiny-qwen3",
  parallel_drafting: false,
  revision: null,
};

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
  [
    "vllm#55776: the model's revision, in a release that is not described",
    {
      vllm_version: "0.34.0",
      nixl_connector_version: 16,
      revision: "b".repeat(40),
      code_revision: null,
    },
    { vllmVersion: "0.34.0", knownFactors: { revision: ["a".repeat(40), "b".repeat(40)] } },
  ],
  ["vllm#49230: the model's own MTP layers", { speculative_config: MTP }, {}],
  [
    "vllm#49230: a draft model that the user gave",
    { speculative_config: { ...MTP, method: "eagle3", model: "org/eagle" } },
    { knownFactors: { speculative_config: { method: "eagle3", model: "org/eagle" } } },
  ],
  [
    "field.md P4: int8_per_token_head",
    { cache_dtype: "int8_per_token_head", head_size: 60, num_kv_heads: 8 },
    { cacheDtype: "int8_per_token_head", knownFactors: { head_size: 60 } },
  ],
  [
    "field.md P4: nvfp4 in a bfloat16 model",
    { dtype: "torch.bfloat16", cache_dtype: "nvfp4", head_size: 128, num_kv_heads: 8 },
    // 32 tokens of 8 heads, K and V of 72 bytes each.
    {
      cacheDtype: "nvfp4",
      metadata: { ...METADATA, blockLengthsBytes: Array(4).fill(32 * 8 * 144) },
    },
  ],
  ["field.md P4: layers by their names, with a region less", { num_hidden_layers: 3 }, {}],
  [
    "a factor that the user gave",
    { num_hidden_layers: 61 },
    { knownFactors: { num_hidden_layers: 61 } },
  ],
])("finds the factors: %s", (_, changed, more) => {
  const factors = { ...FACTORS, ...changed };
  expect(findHashFactors(compatibilityHash(factors), { ...clues, ...more }).factors).toEqual(
    factors,
  );
});

/** Clues of a search that ends soon. In the long form it goes through all combinations. */
const FEW = isLongRun
  ? clues
  : { ...clues, knownFactors: { dtype: "torch.float32", cache_dtype: "auto" } };

test("a search in steps pauses often, and has the same result; without one, it is the number of tried combinations", () => {
  const search = searchHashFactors("0".repeat(64), FEW);
  let steps = 0;
  let step = search.next();
  for (; step.done !== true; step = search.next()) steps += 1;
  const { factors, tried } = step.value;
  expect(factors).toBeUndefined();
  expect(step.value).toEqual(findHashFactors("0".repeat(64), FEW));
  expect(steps).toBe(Math.floor(tried / 256));
  expect(steps).toBeGreaterThan(1);
});
