import { readFileSync } from "node:fs";
import { KvError } from "@kv/interface";
import { describe, expect, test } from "vitest";
import { captured, model } from "../../test/captured-run.js";
import { modelOfConfig } from "../input/model-source.js";
import { SIZE_DEFAULTS, type SizeReport, type SizeSettings, sizeReport } from "./size-report.js";

const GIB = 2 ** 30;

function sized(name: string, settings: Partial<SizeSettings> = {}): SizeReport {
  const config: unknown = JSON.parse(readFileSync(model(name), "utf8"));
  return sizeReport(
    modelOfConfig(name, config),
    config,
    {
      tpSize: 1,
      dpSize: 1,
      memoryBytes: 80 * GIB,
      requestTokens: 8192,
      bandwidthGBps: 25,
      ...SIZE_DEFAULTS,
      ...settings,
    },
    { blockSize: [], layout: [] },
  );
}

describe("how many tokens fit", () => {
  test("dense attention: memory without weights, in whole blocks", () => {
    const found = sized("llama-3.1-70b", { tpSize: 8, weightsBytes: 141 * 10 ** 9 });
    // 80 layers, K and V, one head of 128 elements of 2 bytes on each rank.
    const tokenBytes = 80 * 2 * 128 * 2;
    const cacheBytes = Math.floor(80 * GIB * 0.92) - 141e9 / 8 - 3 * GIB;
    const blocks = Math.floor(cacheBytes / (16 * tokenBytes));
    expect(found.groups).toEqual([
      {
        kind: "full",
        layers: 80,
        blockTokens: 16,
        tokenBytes,
        requestBlocks: 512,
        requestBytes: 8192 * tokenBytes,
      },
    ]);
    expect(found.pool).toEqual({
      blockBytes: 16 * tokenBytes,
      blocks,
      requestBlocks: 512,
      tokens: Math.floor((blocks / 512) * 8192),
      concurrency: blocks / 512,
    });
    const { weightsBytes, otherBytes, unusedBytes } = found.memory;
    expect(weightsBytes + otherBytes + unusedBytes + cacheBytes).toBe(80 * GIB);
    expect(found.handover).toMatchObject({
      lengthBytes: 8192 * tokenBytes,
      descriptors: 80 * 512,
      merged: 80,
    });
  });

  test("a window keeps the batches in flight beside it, and no more for longer requests", () => {
    const blocksOf = (requestTokens: number) =>
      sized("gpt-oss-20b", { requestTokens }).groups.map(({ requestBlocks }) => requestBlocks);
    expect(blocksOf(8192)).toEqual([513, 512]);
    expect(blocksOf(2 ** 17)).toEqual([Math.ceil((127 + 2 * 8192) / 16) + 1, 8192]);
    expect(sized("gpt-oss-20b").groups.map(({ tokenBytes }) => tokenBytes)).toEqual([0, 24 * 1024]);
  });

  test("states take the same for any length", () => {
    const states = (requestTokens: number) =>
      sized("qwen3.5-35b-a3b", { requestTokens, weightsBytes: (70 * 10 ** 9) / 4, tpSize: 2 })
        .groups.filter(({ kind }) => kind === "mamba")
        .map(({ requestBlocks, tokenBytes }) => [requestBlocks, tokenBytes]);
    expect(states(1000)).toEqual([
      [3, 0],
      [3, 0],
      [3, 0],
    ]);
    expect(states(100_000)).toEqual(states(1000));
  });

  test("replicas have caches of their own; experts are spread over all GPUs", () => {
    const [one, four] = [1, 4].map((dpSize) => sized("qwen3.5-35b-a3b", { tpSize: 2, dpSize }));
    expect(four?.concurrency).toBe(4 * (four?.pool.concurrency ?? 0));
    expect(four?.memory.weightsBytes).toBeLessThan((one?.memory.weightsBytes ?? 0) / 3);
    expect(four?.memory.isEstimate).toBe(true);
  });

  test("the estimate of the weights is near the published size", () => {
    // Sizes of the published checkpoints, in GB.
    for (const [name, published] of [
      ["deepseek-v3.2", 689],
      ["gpt-oss-20b", 13.8],
    ] as const) {
      const { memory } = sized(name, { tpSize: 1, memoryBytes: 1000 * GIB });
      expect(memory.weightsBytes / 1e9 / published).toBeGreaterThan(0.75);
      expect(memory.weightsBytes / 1e9 / published).toBeLessThan(1.25);
    }
  });

  test("weights that leave no block, and unknown ones, are errors that say what to give", () => {
    const thrown = (settings: Partial<SizeSettings>) => {
      try {
        return sized("llama-3.1-70b", settings);
      } catch (error) {
        return KvError.is(error) ? `${error.code} ${error.message} ${error.hint}` : error;
      }
    };
    expect(thrown({})).toContain(
      "KV_CONFIG_INVALID llama-3.1-70b: the config does not say how large the weights are give their bytes, such as --weights",
    );
    expect(thrown({ weightsBytes: 100 * GIB })).toContain(
      "KV_CONFIG_INVALID llama-3.1-70b: 107374182400 bytes of weights and 3221225472 of activations leave no block of 5242880 bytes in 79027398246 bytes of a GPU give a larger --tp",
    );
  });
});

describe("kv-plan size", () => {
  const args = ["size", "--config", model("gpt-oss-20b"), "--tp", "2", "--memory", "80GiB"];

  test("prints one screen, which calls an estimate one", async () => {
    const { code, stdout, stderr } = await captured(...args);
    expect([code, stderr]).toEqual([0, ""]);
    expect(stdout.split("\n").length).toBeLessThan(25);
    expect(stdout).toContain("weights (estimate)");
    expect(stdout).toMatch(/fits: [\d,]+ tokens in [\d,]+ blocks/);
  });

  test("prints the same as JSON", async () => {
    const { stdout } = await captured(...args, "--json");
    const found = JSON.parse(stdout) as SizeReport;
    expect(found.pool).toEqual(sized("gpt-oss-20b", { tpSize: 2 }).pool);
  });

  test("refuses a wrong flag, and a model without a config", async () => {
    expect((await captured("size", "--tp", "2")).stderr).toContain("--config");
    const wrong = await captured(...args, "--memory", "much");
    expect([wrong.code, wrong.stderr]).toEqual([2, expect.stringContaining("--memory")]);
  });
});
