import { copyFile, mkdir, mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import optimum from "../../fixtures/model/optimum-llama-float16/expected.json" with {
  type: "json",
};
import qwen2 from "../../fixtures/model/qwen2-bf16/expected.json" with { type: "json" };
import reference from "../../fixtures/model/tiny-qwen3.json" with { type: "json" };
import { kvBytes } from "../engine/cache/kv-layout.js";
import { loadModel, type Model } from "./model.js";
import { buildOnnx } from "./onnx/build-onnx.js";
import { tinyModelConfig } from "./tiny-model.js";
import { readDecoderConfig } from "./weights/decoder-config.js";
import { seededWeights } from "./weights/seeded-weights.js";
import type { ForwardDone } from "./worker/worker-protocol.js";

const { prompt } = reference;

let scratch = "";
let model: Model;
beforeAll(async () => {
  scratch = await mkdtemp(join(tmpdir(), "kv-model-"));
  model = await loadModel({ cacheDirectory: join(scratch, "cache") });
});
afterAll(async () => {
  await model.close();
  await rm(scratch, { recursive: true });
});

let sequences = 0;
const freshId = () => `sequence-${sequences++}`;

/**
 * Runs the prompt in pieces, then decodes greedily. Returns the tokens and the step that chose the
 * first one.
 */
async function generate(
  on: Model,
  tokens: readonly number[],
  count: number,
  { pieces = [tokens.length], sequenceId = freshId(), past }: GenerateOptions = {},
): Promise<{ tokens: number[]; first: ForwardDone; kv: ArrayBuffer[] }> {
  const kv: ArrayBuffer[] = [];
  let position = past?.tokens ?? 0;
  let step: ForwardDone | undefined;
  for (const piece of pieces) {
    const part = Int32Array.from(tokens.slice(position, position + piece));
    const loaded = past !== undefined && step === undefined ? { past } : {};
    step = await on.forward({ sequenceId, tokens: part, position, topLogprobs: 5, ...loaded });
    kv.push(step.newKv);
    position += piece;
  }
  if (step === undefined) throw new Error("nothing to run");
  const first = step;
  const chosen = [step.topTokens[0] ?? -1];
  while (chosen.length < count) {
    step = await on.forward({ sequenceId, tokens: Int32Array.from(chosen.slice(-1)), position });
    position += 1;
    chosen.push(step.topTokens[0] ?? -1);
  }
  await on.dropSequence(sequenceId);
  return { tokens: chosen, first, kv };
}

interface GenerateOptions {
  pieces?: number[];
  sequenceId?: string;
  past?: { tokens: number; kv: ArrayBuffer };
}

test("reports the model's shape in its config", () => {
  expect(model.config).toMatchObject({
    name: "tiny-qwen3",
    layers: 4,
    kvHeads: 4,
    headDim: 32,
    vocabSize: 1024,
    maxModelLen: 2048,
    eosTokenIds: [2],
  });
  expect(kvBytes(model.config, 100)).toBe(4 * 4 * 100 * 64 * 4);
});

test("generates the tokens of the reference implementation", async () => {
  const run = await generate(model, prompt, 16);
  expect(run.tokens).toEqual(reference.greedy);
  expect([...run.first.topTokens]).toEqual(reference.first_top_tokens);
  run.first.topLogprobs.forEach((logprob, i) => {
    expect(logprob).toBeCloseTo(reference.first_top_logprobs[i] ?? 0, 4);
  });
  expect(run.first.newKv.byteLength).toBe(kvBytes(model.config, 100));
});

test.each([[[64, 36]], [[1, 99]], [[33, 33, 33, 1]]])(
  "a prompt in pieces of %j gives the same tokens",
  async (pieces) => {
    expect((await generate(model, prompt, 16, { pieces })).tokens).toEqual(reference.greedy);
  },
);

test("another thread continues from KV in wire order", async () => {
  const other = await loadModel({ cacheDirectory: join(scratch, "cache") });
  try {
    const { first } = await generate(model, prompt, 1);
    const past = { tokens: 99, kv: firstTokens(first.newKv, 100, 99) };
    const run = await generate(other, prompt, 16, { past, pieces: [1] });
    expect(run.tokens).toEqual(reference.greedy);
    expect(past.kv.byteLength, "transferred, not copied").toBe(0);
  } finally {
    await other.close();
  }
});

test("a zeroed block of the past changes the generated tokens", async () => {
  const { first } = await generate(model, prompt, 1);
  const run = async (zeroed: number[]) => {
    const kv = new Float32Array(firstTokens(first.newKv, 100, 99));
    for (const token of zeroed) {
      for (let row = 0; row < 16; row++)
        kv.fill(0, (row * 99 + token) * 64, (row * 99 + token + 1) * 64);
    }
    return await generate(model, prompt, 16, { past: { tokens: 99, kv: kv.buffer }, pieces: [1] });
  };
  const block = Array.from({ length: 16 }, (_, i) => 48 + i);
  expect((await run([])).tokens).toEqual(reference.greedy);
  expect((await run(block)).tokens).not.toEqual(reference.greedy);
});

test("interleaved sequences do not affect each other", async () => {
  const other = prompt.map((token) => 1023 - token);
  const alone = await generate(model, other, 12);
  const [one, two, three] = await Promise.all([
    generate(model, prompt, 16, { pieces: [50, 50] }),
    generate(model, other, 12, { pieces: [20, 80] }),
    generate(model, prompt, 16),
  ]);
  expect([one.tokens, two.tokens, three.tokens]).toEqual([
    reference.greedy,
    alone.tokens,
    reference.greedy,
  ]);
});

test("position 0 starts a sequence again", async () => {
  const sequenceId = freshId();
  await model.forward({ sequenceId, tokens: Int32Array.of(5, 6, 7), position: 0 });
  expect((await generate(model, prompt, 16, { sequenceId })).tokens).toEqual(reference.greedy);
});

describe("refuses", () => {
  const tokens = Int32Array.of(5);
  const kv = () => new ArrayBuffer(kvBytes(model.config, 3));

  test.each<[string, () => Partial<Parameters<Model["forward"]>[0]>, RegExp]>([
    ["no tokens", () => ({ tokens: new Int32Array(0) }), /no tokens/],
    ["a token outside the vocabulary", () => ({ tokens: Int32Array.of(1024) }), /1024 .*1024/],
    ["a negative token", () => ({ tokens: Int32Array.of(-1) }), /-1/],
    ["more tokens than fit", () => ({ tokens: new Int32Array(2049) }), /2049 .*2048/],
    ["a position without its past", () => ({ position: 3 }), /position 3.*none/],
    [
      "a past of another length",
      () => ({ position: 4, past: { tokens: 3, kv: kv() } }),
      /3 tokens.*4/,
    ],
    [
      "a past of too few bytes",
      () => ({ position: 4, past: { tokens: 4, kv: kv() } }),
      /12288 bytes.*16384/,
    ],
    ["no logprobs", () => ({ topLogprobs: 0 }), /between 1 and 100/],
  ])("%s", async (_, change, message) => {
    const request = { sequenceId: freshId(), tokens, position: 0, ...change() };
    await expect(model.forward(request)).rejects.toMatchObject({
      code: "KV_REQUEST_INVALID",
      message: expect.stringMatching(message),
    });
  });

  test("a position that does not continue the sequence, and keeps the sequence", async () => {
    const sequenceId = freshId();
    await model.forward({ sequenceId, tokens: Int32Array.from(prompt), position: 0 });
    await expect(model.forward({ sequenceId, tokens, position: 99 })).rejects.toThrow(
      /holds 100 of its tokens/,
    );
    const next = await model.forward({ sequenceId, tokens: Int32Array.of(180), position: 100 });
    expect(next.topTokens[0]).toBe(reference.greedy[1]);
    await model.dropSequence(sequenceId);
    await expect(model.forward({ sequenceId, tokens, position: 101 })).rejects.toThrow(
      /holds none of its tokens/,
    );
  });

  test("a past that makes the logits NaN or infinite", async () => {
    const past = { tokens: 3, kv: kv() };
    new Float32Array(past.kv).fill(Number.NaN);
    await expect(
      model.forward({ sequenceId: freshId(), tokens, position: 3, past }),
    ).rejects.toMatchObject({
      code: "KV_ENGINE_FAILED",
      message: expect.stringContaining("not finite"),
    });
  });
});

test("after a failed step with a loaded past the sequence cannot continue", async () => {
  const sequenceId = freshId();
  const tokens = Int32Array.of(5);
  await model.forward({ sequenceId, tokens: Int32Array.from(prompt), position: 0 });
  const past = { tokens: 3, kv: new ArrayBuffer(kvBytes(model.config, 3)) };
  new Float32Array(past.kv).fill(Number.NaN);
  await expect(model.forward({ sequenceId, tokens, position: 3, past })).rejects.toThrow(
    /not finite/,
  );
  await expect(model.forward({ sequenceId, tokens, position: 100 })).rejects.toThrow(
    /holds none of its tokens/,
  );
});

test("tokens are copied when the call is made", async () => {
  const running = model.forward({ sequenceId: freshId(), tokens: Int32Array.of(5), position: 0 });
  const tokens = Int32Array.from(prompt);
  const waiting = model.forward({ sequenceId: freshId(), tokens, position: 0 });
  tokens.fill(0);
  await running;
  expect((await waiting).topTokens[0]).toBe(reference.greedy[0]);
});

test("close finishes the running step, rejects waiting ones, and may be called again", async () => {
  const own = await loadModel({ cacheDirectory: join(scratch, "cache") });
  const step = () =>
    own.forward({ sequenceId: freshId(), tokens: Int32Array.from(prompt), position: 0 });
  const running = step();
  const waiting = step();
  const rejected = expect(waiting).rejects.toMatchObject({ code: "KV_REQUEST_ABORTED" });
  await Promise.all([own.close(), own.close()]);
  await rejected;
  expect((await running).topTokens[0]).toBe(reference.greedy[0]);
  await expect(step()).rejects.toMatchObject({ code: "KV_REQUEST_ABORTED" });
  await own.dropSequence("any");
});

test("a Hugging Face checkpoint in bfloat16, with biases and tied embeddings, gives the reference's tokens", async () => {
  const directory = fileURLToPath(new URL("../../fixtures/model/qwen2-bf16", import.meta.url));
  const converted = await loadModel({ directory, cacheDirectory: join(scratch, "cache") });
  try {
    const run = await generate(converted, qwen2.prompt, 12);
    expect(run.tokens).toEqual(qwen2.greedy);
    expect([...run.first.topTokens]).toEqual(qwen2.first_top_tokens);
    expect(run.first.topLogprobs[0]).toBeCloseTo(qwen2.first_top_logprobs[0] ?? 0, 4);
  } finally {
    await converted.close();
  }
});

test("a model with a half-precision cache reads and writes the same wire order", async () => {
  const directory = join(scratch, "half");
  await mkdir(directory);
  const json = tinyModelConfig();
  await writeFile(join(directory, "config.json"), JSON.stringify(json));
  const config = readDecoderConfig(json, { where: "half" });
  await buildOnnx({
    config,
    weights: seededWeights(config, { seed: 1234 }),
    directory,
    kvType: "float16",
  });
  const half = await loadModel({ directory });
  try {
    expect(half.config).toMatchObject({ kvType: "float16" });
    const whole = await generate(half, prompt, 16);
    expect(whole.first.topTokens[0]).toBe(reference.greedy[0]);
    const past = { tokens: 99, kv: firstTokens(whole.first.newKv, 100, 99) };
    expect((await generate(half, prompt, 16, { past, pieces: [1] })).tokens).toEqual(whole.tokens);
    const exact = (await generate(model, prompt, 1)).first.newKv;
    const difference = new Float32Array(exact).map((value, i) =>
      Math.abs(value - (new Float32Array(whole.first.newKv)[i] ?? 0)),
    );
    expect(Math.max(...difference)).toBeLessThan(0.02);
  } finally {
    await half.close();
  }
});

test("an export by optimum in half precision, logits included, is used as it is", async () => {
  const directory = fileURLToPath(
    new URL("../../fixtures/model/optimum-llama-float16", import.meta.url),
  );
  const exported = await loadModel({ directory });
  try {
    expect(exported.config).toMatchObject({
      layers: 2,
      kvHeads: 2,
      headDim: 8,
      vocabSize: 128,
      kvType: "float16",
    });
    for (const pieces of [[40], [25, 15]]) {
      expect((await generate(exported, optimum.prompt, 12, { pieces })).tokens).toEqual(
        optimum.greedy,
      );
    }
  } finally {
    await exported.close();
  }
});

test("a directory that is not a model is refused by name", async () => {
  const directory = join(scratch, "broken");
  await mkdir(directory);
  await writeFile(join(directory, "config.json"), JSON.stringify(tinyModelConfig()));
  await writeFile(join(directory, "model.onnx"), "no model");
  await expect(loadModel({ directory })).rejects.toMatchObject({ code: "KV_MODEL_UNSUPPORTED" });
  await copyFile(join(model.config.directory, "model.onnx"), join(directory, "model.onnx"));
  await expect(loadModel({ directory }), "without its weights").rejects.toMatchObject({
    code: "KV_MODEL_UNSUPPORTED",
  });
  await expect(loadModel({ intraOpThreads: 0 })).rejects.toMatchObject({
    code: "KV_CONFIG_INVALID",
  });
});

/** The first `count` tokens of each head of KV in wire order. */
function firstTokens(kv: ArrayBuffer, tokens: number, count: number): ArrayBuffer {
  const rows = new Float32Array(kv);
  const perToken = 64;
  const result = new Float32Array((rows.length / tokens) * count);
  for (let row = 0; row < rows.length / perToken / tokens; row++) {
    const start = row * tokens * perToken;
    result.set(rows.subarray(start, start + count * perToken), row * count * perToken);
  }
  return result.buffer;
}
