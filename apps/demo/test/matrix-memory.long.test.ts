// A long suite: pairs of TP and block sizes in memory; matrix-nixl.test.ts has some over UCX.
import { isLongRun, someOf } from "@kv/testing/long-run";
import { describe, expect, it, vi } from "vitest";
import { expectEqual, PAIRS, PUSH_PAIRS } from "./support/matrix.js";

// A generous limit for sixteen requests on a busy machine.
vi.setConfig({ testTimeout: 180_000 });

describe("tokens and KV over the embedded transport", () => {
  // Each TP and block size of either side at least once; accuracy.long.test.ts has equal sizes, and
  // blocks of 32 tokens on either side.
  it.each(isLongRun ? PAIRS : [PAIRS[3], PAIRS[7], PAIRS[8]])(
    "TP $prefillTp→$decodeTp, block $prefillBlockSize→$decodeBlockSize",
    async (pair) => {
      await expectEqual({ transport: "memory", ...pair });
    },
  );

  it.each(
    someOf(
      [
        { prefillTp: 8, decodeTp: 1, tinyKvHeads: 2 },
        { prefillTp: 4, decodeTp: 8 },
        { prefillTp: 1, decodeTp: 4, tinyKvHeads: 2 },
      ],
      3,
    ),
  )("replicated KV heads: TP $prefillTp→$decodeTp", async (pair) => {
    await expectEqual({ transport: "memory", ...pair });
  });

  it.each(PUSH_PAIRS)(
    "push, TP $prefillTp→$decodeTp, block $prefillBlockSize→$decodeBlockSize",
    async (pair) => {
      await expectEqual({ transport: "memory", connector: "push", ...pair });
    },
  );

  it("push, prefill first", async () => {
    await expectEqual({
      transport: "memory",
      connector: "push",
      pushLegs: "prefill-first",
      prefills: 2,
    });
  });

  it("push, layerwise, to other block and TP sizes", async () => {
    await expectEqual({
      transport: "memory",
      connector: "push",
      pushLayerwise: true,
      prefillTp: 2,
      decodeBlockSize: 32,
    });
  });

  it.each(
    someOf(
      [
        { connector: "push", pushLayerwise: true, prefillTp: 2, decodeBlockSize: 24 },
        { connector: "push" },
        { prefillPlatform: "neuron", decodePlatform: "neuron", decodeBlockSize: 32 },
        { connector: "NixlConnector" },
      ] as const,
      2,
    ),
  )("prompts in chunks of 40 tokens, %o", async (options) => {
    const instance = {
      maxNumBatchedTokens: 40,
      maxNumSeqs: options.prefillPlatform === "neuron" ? 1 : 16,
    };
    await expectEqual({ transport: "memory", ...options, instance });
  });

  it("pull and push in one deployment", async () => {
    await expectEqual({
      transport: "memory",
      connector: "auto",
      prefills: 2,
      decodes: 2,
      decodeTp: 2,
    });
  });

  it.runIf(isLongRun)("two prefills and two decodes", async () => {
    await expectEqual({ transport: "memory", prefills: 2, decodes: 2 });
  });

  it("refuses an unknown connector with the list of known ones", async () => {
    await expect(expectEqual({ transport: "memory", connector: "Nixl" })).rejects.toThrow(
      /Nixl; known are .*NixlConnector/,
    );
  });
});
