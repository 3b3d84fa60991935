import { copyFile, mkdir, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import optimum from "../../fixtures/model/optimum-llama-float16/expected.json" with {
  type: "json",
};
import qwen2 from "../../fixtures/model/qwen2-bf16/expected.json" with { type: "json" };
import qwen3 from "../../fixtures/model/qwen3-bf16/expected.json" with { type: "json" };
import { kvBytes } from "../engine/cache/kv-layout.js";
import { loadModel, type Model } from "./model.js";
import { tinyModelConfig } from "./prepare-model.js";
import type { ForwardDone } from "./worker/worker-protocol.js";

const prompt = Array.from({ length: 100 }, (_, i) => ((7 * i * i + 3 * i + 11) % 1000) + 10);
const fixture = (name: string) =>
  fileURLToPath(new URL(`../../fixtures/model/${name}`, import.meta.url));

const scratch = scratchFolder();
let model: Model;
/** What the model makes of the prompt in one piece. */
let whole: Awaited<ReturnType<typeof generate>>;
beforeAll(async () => {
  model = await load();
  whole = await generate(model, prompt, 16);
});
afterAll(() => model.close());

const load = (directory?: string) =>
  loadModel({ directory, cacheDirectory: join(scratch, "cache") });

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
): Promise<{ tokens: number[]; first: ForwardDone }> {
  let position = past?.tokens ?? 0;
  let step: ForwardDone | undefined;
  for (const piece of pieces) {
    const part = Int32Array.from(tokens.slice(position, position + piece));
    const loaded = step === undefined ? past : undefined;
    const input = { sequenceId, tokens: part, position, topLogprobs: 5, past: loaded };
    step = await on.forward(input);
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
  return { tokens: chosen, first };
}

interface GenerateOptions {
  pieces?: number[];
  sequenceId?: string;
  past?: { tokens: number; kv: ArrayBuffer } | undefined;
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
  expect(whole.first.newKv.byteLength).toBe(kvBytes(model.config, 100));
});

test("its tokens differ, and follow from the whole prompt", async () => {
  expect(new Set(whole.tokens).size).toBeGreaterThan(8);
  const other = await generate(model, [9, ...prompt.slice(1)], 16);
  expect(other.tokens).not.toEqual(whole.tokens);
});

test.each([[[64, 36]], [[1, 99]], [[33, 33, 33, 1]]])(
  "a prompt in pieces of %j gives the same tokens",
  async (pieces) => {
    expect((await generate(model, prompt, 16, { pieces })).tokens).toEqual(whole.tokens);
  },
);

/** The past of all tokens of a prompt but the last one, with some of them zeroed. */
function pastOf(
  { config }: Model,
  { first }: typeof whole,
  length: number,
  zeroed: readonly number[] = [],
) {
  const tokens = length - 1;
  const width = 2 * config.headDim;
  const all = new Float32Array(first.newKv);
  const kv = new Float32Array(kvBytes(config, tokens) / 4);
  for (let row = 0; row < config.layers * config.kvHeads; row++) {
    const start = row * length * width;
    kv.set(all.subarray(start, start + tokens * width), row * tokens * width);
    for (const token of zeroed.map((at) => row * tokens + at))
      kv.fill(0, token * width, (token + 1) * width);
  }
  return { tokens, kv: kv.buffer };
}

test("another thread continues from KV in wire order", async () => {
  await using other = await load();
  const past = pastOf(model, whole, 100);
  const run = await generate(other, prompt, 16, { past, pieces: [1] });
  expect(run.tokens).toEqual(whole.tokens);
  expect(past.kv.byteLength, "transferred, not copied").toBe(0);
});

test("a zeroed block of the past changes the generated tokens", async () => {
  const run = async (zeroed: number[]) =>
    (await generate(model, prompt, 16, { past: pastOf(model, whole, 100, zeroed), pieces: [1] }))
      .tokens;
  expect(await run([])).toEqual(whole.tokens);
  expect(await run(Array.from({ length: 16 }, (_, i) => 48 + i))).not.toEqual(whole.tokens);
});

test("interleaved sequences do not affect each other", async () => {
  const other = prompt.map((token) => 1023 - token);
  const alone = await generate(model, other, 12);
  const all = await Promise.all([
    generate(model, prompt, 16, { pieces: [50, 50] }),
    generate(model, other, 12, { pieces: [20, 80] }),
    generate(model, prompt, 16),
  ]);
  expect(all.map(({ tokens }) => tokens)).toEqual([whole.tokens, alone.tokens, whole.tokens]);
});

test("position 0 starts a sequence again", async () => {
  const sequenceId = freshId();
  await model.forward({ sequenceId, tokens: Int32Array.of(5, 6, 7), position: 0 });
  expect((await generate(model, prompt, 16, { sequenceId })).tokens).toEqual(whole.tokens);
});

describe("refuses", () => {
  const tokens = Int32Array.of(5);
  const damaged = () => {
    const kv = new ArrayBuffer(kvBytes(model.config, 3));
    new Float32Array(kv).fill(Number.NaN);
    return { position: 3, past: { tokens: 3, kv } };
  };

  test("a position that does not continue the sequence, and keeps the sequence", async () => {
    const sequenceId = freshId();
    await model.forward({ sequenceId, tokens: Int32Array.from(prompt), position: 0 });
    await expect(model.forward({ sequenceId, tokens, position: 99 })).rejects.toMatchObject({
      code: "KV_REQUEST_INVALID",
      message: expect.stringContaining("holds 100 of its tokens"),
    });
    const [token = 0, next] = whole.tokens;
    const step = { sequenceId, tokens: Int32Array.of(token), position: 100 };
    expect((await model.forward(step)).topTokens[0]).toBe(next);
    await model.dropSequence(sequenceId);
    await expect(model.forward({ sequenceId, tokens, position: 101 })).rejects.toThrow(
      /holds none of its tokens/,
    );
  });

  test("a past that makes the logits not finite, and the sequence cannot continue", async () => {
    const sequenceId = freshId();
    await model.forward({ sequenceId, tokens: Int32Array.from(prompt), position: 0 });
    await expect(model.forward({ sequenceId, tokens, ...damaged() })).rejects.toMatchObject({
      code: "KV_ENGINE_FAILED",
      message: expect.stringContaining("not finite"),
    });
    await expect(model.forward({ sequenceId, tokens, position: 100 })).rejects.toThrow(
      /holds none of its tokens/,
    );
  });
});

test("tokens are copied when the call is made", async () => {
  const running = model.forward({ sequenceId: freshId(), tokens: Int32Array.of(5), position: 0 });
  const tokens = Int32Array.from(prompt);
  const waiting = model.forward({ sequenceId: freshId(), tokens, position: 0 });
  tokens.fill(0);
  await running;
  expect((await waiting).topTokens[0]).toBe(whole.tokens[0]);
});

test("close finishes the running step, rejects waiting ones, and may be called again", async () => {
  const own = await load();
  const step = () =>
    own.forward({ sequenceId: freshId(), tokens: Int32Array.from(prompt), position: 0 });
  const running = step();
  const rejected = expect(step()).rejects.toMatchObject({ code: "KV_REQUEST_ABORTED" });
  await Promise.all([own.close(), own.close()]);
  await rejected;
  expect((await running).topTokens[0]).toBe(whole.tokens[0]);
  await expect(step()).rejects.toMatchObject({ code: "KV_REQUEST_ABORTED" });
  await own.dropSequence("any");
});

test.each([
  ["qwen2-bf16", "biases and tied embeddings", qwen2],
  ["qwen3-bf16", "norms of queries and keys", qwen3],
])(
  "a Hugging Face checkpoint, %s, with %s, gives the reference's tokens",
  async (name, _, reference) => {
    await using converted = await load(fixture(name));
    const { tokens, first } = await generate(converted, reference.prompt, 12);
    expect(tokens).toEqual(reference.greedy);
    expect([...first.topTokens]).toEqual(reference.first_top_tokens);
    for (const [i, logprob] of first.topLogprobs.entries())
      expect(logprob).toBeCloseTo(reference.first_top_logprobs[i] ?? 0, 4);
  },
);

test("an export by optimum in half precision, logits included, is used as it is", async () => {
  await using exported = await load(fixture("optimum-llama-float16"));
  expect(exported.config).toMatchObject({
    layers: 2,
    kvHeads: 2,
    headDim: 8,
    vocabSize: 128,
    kvType: "float16",
  });
  const run = (pieces: number[], past?: ReturnType<typeof pastOf>) =>
    generate(exported, optimum.prompt, 12, { pieces, past });
  const all = await run([40]);
  // Its cache of half precision has the same wire order.
  const runs = [all, await run([25, 15]), await run([1], pastOf(exported, all, 40))];
  expect(runs.map(({ tokens }) => tokens)).toEqual(runs.map(() => optimum.greedy));
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
});
