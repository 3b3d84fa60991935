import { join } from "node:path";
import { EXIT_CODES } from "@kv/program";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { describe, expect, test } from "vitest";
import { planFromDocument } from "../src/data/index.js";
import {
  captured,
  complaint,
  engine,
  model,
  PAIR,
  planned,
  refused,
  region,
  written,
} from "./captured-run.js";

const folder = scratchFolder();

const qwen = `--config ${model("qwen3-0.6b")} --tp 2 --tp 1 --tokens 64`;

describe("--pp", () => {
  test("reads each stage's layers from its ranks, with the same total as one stage", async () => {
    const found = await planned(`${qwen} --pp 2`);
    const layers = (from: number, to: number) =>
      Array.from(
        { length: to - from },
        (_, index) => `model.layers.${from + index}.self_attn.attn`,
      );
    expect(found.stages).toEqual([
      { stage: 0, regions: layers(0, 14), read: [0, 1], readers: [0] },
      { stage: 1, regions: layers(14, 28), read: [0, 1], readers: [0] },
    ]);
    const [rank] = found.ranks;
    expect(
      rank?.reads.map((read) => [read.prefillStage, read.prefillRank, read.layers, read.heads]),
    ).toEqual([
      [0, 0, 14, [0, 4]],
      [0, 1, 14, [4, 8]],
      [1, 0, 14, [0, 4]],
      [1, 1, 14, [4, 8]],
    ]);
    expect(
      found.notifications.map((one) => [one.prefillStage, one.prefillRank, one.awaits, one.from]),
    ).toEqual([
      [0, 0, 1, [0]],
      [0, 1, 1, [0]],
      [1, 0, 1, [0]],
      [1, 1, 1, [0]],
    ]);
    const whole = await planned(qwen);
    expect(found.request.lengthBytes).toBe(whole.request.lengthBytes);
    expect(found.prefill).toMatchObject({
      ppSize: 2,
      regions: 28,
      bytesPerRank: whole.prefill.bytesPerRank / 2,
    });
    expect(whole.stages.map(({ stage, regions }) => [stage, regions.length])).toEqual([[0, 28]]);
  });

  test("lists notified-only ranks of every stage", async () => {
    const found = await planned(`--config ${model("deepseek-v2-lite")} --tp 2 --tp 1 --pp 2`);
    expect(found.ranks[0]?.notifyOnly).toEqual([
      { prefillRank: 1, prefillStage: 0 },
      { prefillRank: 1, prefillStage: 1 },
    ]);
  });

  // The remaining layers go to the stages before the last (vLLM 0.33, get_pp_indices).
  test.each([
    [5, 3, [2, 2, 1]],
    [7, 3, [2, 3, 2]],
    [11, 4, [3, 3, 3, 2]],
  ])("%i layers over %i stages of a model by its shape: %j", async (layers, pp, expected) => {
    const shape = [`--layers ${layers} --kv-heads 4 --head-size 8`];
    const found = await planned(...shape, `--pp ${pp} --tokens 32`);
    expect(found.stages.map(({ regions }) => regions.length)).toEqual(expected);
    expect(found.assumed.join()).toContain("dealt out to pipeline stages evenly");
  });

  test("each stage has layers of both groups when groups have their own regions", async () => {
    const regions = (staged: boolean) =>
      Array.from({ length: 60 }, (_, layer) =>
        region(1, {
          name: `layers.${layer}`,
          groupId: layer % 6 === 5 ? 1 : 0,
          stage: staged ? Math.floor(layer / 30) : undefined,
        }),
      );
    const file = written(join(folder, "groups.json"), {
      ...PAIR,
      groups: ["swa", "full"],
      windowTokens: [64, null],
      prefill: engine(2, { ppSize: 2, regions: regions(true) }),
      decode: engine(2, { regions: regions(false) }),
    });
    const found = await planned(`--file ${file} --tokens 256`);
    expect(found.groups).toEqual(["swa", "full"]);
    expect(found.stages.map(({ regions: names }) => names.length)).toEqual([30, 30]);
    const shown = new Set(found.blocks.map(({ group, stage }) => `${group} ${stage}`));
    expect([...shown].sort()).toEqual(["0 0", "0 1", "1 0", "1 1"]);
    for (const block of found.blocks)
      expect(new Set(block.pieces.map(({ prefillStage }) => prefillStage)).size).toBeLessThan(2);
  });
});

describe("refused", () => {
  test("by vLLM's decode workers; the report of a planned pair says so", async () => {
    expect((await planned(qwen)).refusedByVllm).toEqual([]);
    const found = await planned(`${qwen} --pp 2`);
    expect(found.refusedByVllm.join()).toContain(
      '2 pipeline stages: the handshake ends with "Number of KV layers must match between prefill and decode" (0.33); a decode worker of @kv/pull',
    );
    const { code, stdout } = await captured(`${qwen} --pp 2`);
    expect(code).toBe(EXIT_CODES.ok);
    expect(stdout).toMatch(/^not for a vLLM decode worker: prefill has 2 pipeline stages/m);
    // vllm#42895, by the table of vLLM's checks.
    const blocks = await planned(`${qwen} --block-size 16 --block-size 32`);
    expect(blocks.refusedByVllm.join()).toContain(
      "a vLLM of TP 1 with kernel blocks of 32 tokens refuses a peer of TP 2 with blocks of 16 (0.33)",
    );
  });

  test("decode stages, with the change that works", async () => {
    const found = await refused(`${qwen} --pp 2,2`);
    expect(found).toMatchObject({ code: "KV_PLAN_UNSUPPORTED", details: { ppSize: 2 } });
    expect(found.wouldWork).toEqual(["decode with one pipeline stage"]);
  });

  test("proposes changes that keep prefill's stages", async () => {
    const found = await refused(`${qwen} --pp 2 --layout LHBNC`);
    expect(found.wouldWork).toEqual(
      expect.arrayContaining([
        "the layout LBHNC (HND) on both sides",
        "decode with TP 2",
        "prefill with TP 1",
      ]),
    );
  });

  test.each<[string, string[], string]>([
    ["more stages than layers", [`${qwen} --pp 29`], "--pp 29 is more than the 28 layers"],
    ["three sizes", [`${qwen} --pp 1,2,3`], "--pp is given 3 times"],
    ["--pp together with a file", ["--file x.json --pp 2"], "--pp has no effect with --file"],
  ])("%s", async (_what, args, message) => {
    expect(await complaint(...args)).toContain(message);
  });
});

describe("a file", () => {
  const layer = (index: number, tpSize: number, change: object = {}) =>
    region(tpSize, { name: `layer.${index}`, ...change });
  const decode = engine(1, { regions: [0, 1, 2].map((index) => layer(index, 1)) });
  /** A prefill engine of two stages: the layers, each with its stage. */
  const staged = (...stages: readonly (readonly [index: number, stage: number])[]) =>
    engine(2, { ppSize: 2, regions: stages.map(([index, stage]) => layer(index, 2, { stage })) });
  const fileOf = (prefill: object) =>
    written(join(folder, "pair.json"), { ...PAIR, prefill, decode });

  test("gives the stage of each region", async () => {
    const prefill = staged([2, 1], [1, 1], [0, 0]);
    const found = await planned(`--file ${fileOf(prefill)} --tokens 64`);
    expect(found.stages.map(({ regions }) => regions)).toEqual([
      ["layer.0"],
      ["layer.1", "layer.2"],
    ]);
    expect(found.request.lengthBytes).toBe(3 * 64 * 64 * 4);
  });

  test("the smallest pool of all stages limits the request", async () => {
    const small = { stage: 1, numBlocks: 3 };
    const prefill = engine(2, {
      ppSize: 2,
      regions: [layer(0, 2), layer(1, 2, small), layer(2, 2, small)],
    });
    const found = await refused(`--file ${fileOf(prefill)} --tokens 64`);
    expect(found.reason).toContain("too small for a request of 64 tokens");
  });

  test("refuses a cache that no stage has", async () => {
    const { reason } = await refused(`--file ${fileOf(staged([0, 0], [1, 1]))}`);
    expect(reason).toContain('no remote rank that is given holds the cache "layer.2"');
  });

  test.each<[string, object, string]>([
    ["a stage beyond the last", staged([0, 2]), "prefill.regions.0.stage: stage 2 of 2"],
    ["a stage without regions", staged([0, 0]), "prefill.regions: stage 1 of 2 has none"],
  ])("refuses %s", async (_what, prefill, message) => {
    expect(await complaint(`--file ${fileOf(prefill)}`)).toContain(message);
  });
});

describe("forms", () => {
  const flags = [`${qwen} --pp 2`];

  test("text has a line per stage, and rank names include the stage", async () => {
    const { stdout } = await captured(...flags);
    expect(stdout).toMatch(/^prefill +TP 2, PP 2 /m);
    expect(stdout).toMatch(/^D0 +0-7 +pp1tp0 +0-3 +14 /m);
    expect(stdout).toMatch(/^1 +14 +layers 14-27 +pp1tp0, pp1tp1 +D0$/m);
    expect(stdout).toMatch(/^pp1tp1 +1 +D0$/m);
    expect((await captured(qwen)).stdout).not.toMatch(/stage|pp0/);
  });

  test("SVG has a box per rank of each stage, and each curve starts at a different rank", async () => {
    const { stdout } = await captured(...flags, "--svg");
    expect(stdout.match(/<g class="rank" data-(?:prefill="pp\dtp\d|decode="D\d)"/g)).toHaveLength(
      5,
    );
    expect(new Set(stdout.match(/<path class="edge[^>]* d="M \d+ \d+/g))).toHaveProperty("size", 4);
  });

  test("--plans prints plans that name the stages", async () => {
    const { stdout } = await captured(...flags, "--plans");
    const plan = planFromDocument(JSON.parse(stdout));
    expect(plan.stages).toEqual([0, 1]);
    expect(plan.sources.map(({ remotePpRank }) => remotePpRank)).toEqual([0, 0, 1, 1]);
  });

  test("groups that share regions", async () => {
    const { code, stdout } = await captured(`--config ${model("gpt-oss-20b")} --pp 2`);
    expect(code).toBe(EXIT_CODES.failed);
    expect(stdout).toContain(
      "groups of layers share regions (12 swa, 12 full), which are other ones on a pipeline stage than on an engine without stages [KV_PLAN_UNSUPPORTED]",
    );
  });
});
