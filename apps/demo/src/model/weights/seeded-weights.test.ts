import { createHash } from "node:crypto";
import { KvError } from "@kv/interface";
import { expect, test } from "vitest";
import reference from "../../../fixtures/model/tiny-qwen3.json" with { type: "json" };
import { tinyModelConfig } from "../tiny-model.js";
import { readDecoderConfig } from "./decoder-config.js";
import { seededWeights } from "./seeded-weights.js";
import { fillNormal, mt19937 } from "./torch-random.js";

const where = "test";

interface Weight {
  shape: number[];
  sha256: string;
  first: number[];
}

test("every weight is PyTorch's to the last bit", async () => {
  const source = seededWeights(readDecoderConfig(tinyModelConfig(), { where }), { seed: 1234 });
  const weights = Object.entries<Weight>(reference.weights);
  expect(weights).toHaveLength(47);
  for (const [name, weight] of weights) {
    const data = await source.read(name);
    expect({ name, shape: source.shape(name), first: [...data.subarray(0, 4)] }).toEqual({
      name,
      shape: weight.shape,
      first: weight.first,
    });
    expect({ name, sha256: sha256(data) }).toEqual({ name, sha256: weight.sha256 });
  }
});

test("another number of KV heads changes every later draw, as in PyTorch", async () => {
  const source = seededWeights(readDecoderConfig(tinyModelConfig({ kvHeads: 2 }), { where }), {
    seed: 1234,
  });
  const name = "lm_head.weight";
  expect(sha256(await source.read(name))).toBe(reference.kv_heads_2[name].sha256);
  expect(reference.kv_heads_2[name].sha256).not.toBe(reference.weights[name].sha256);
});

test("refuses configurations that PyTorch draws differently", () => {
  const config = readDecoderConfig(tinyModelConfig(), { where });
  for (const change of [{ tieWordEmbeddings: true }, { hiddenSize: 40 }]) {
    expect(() => seededWeights({ ...config, ...change }, { seed: 1 })).toThrow(
      expect.objectContaining({ code: "KV_MODEL_UNSUPPORTED" }),
    );
  }
  expect(() => fillNormal(new Float32Array(17), mt19937(1), { std: 1 })).toThrow(RangeError);
});

test("a weight that does not exist is an error", async () => {
  const source = seededWeights(readDecoderConfig(tinyModelConfig(), { where }), { seed: 1234 });
  await expect(source.read("model.layers.4.mlp.up_proj.weight")).rejects.toSatisfy(KvError.is);
});

function sha256(data: Float32Array): string {
  return createHash("sha256")
    .update(new Uint8Array(data.buffer, data.byteOffset, data.byteLength))
    .digest("hex");
}
