// A long suite: pairs of TP and block sizes in memory; matrix-nixl.test.ts has some over UCX.
import { isLongRun, someOf } from "@kv/testing/long-run";
import { describe, it, vi } from "vitest";
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

  it.each([
    // Replicated KV heads.
    ...someOf(
      [
        { prefillTp: 8, decodeTp: 1, tinyKvHeads: 2 },
        { prefillTp: 4, decodeTp: 8 },
        { prefillTp: 1, decodeTp: 4, tinyKvHeads: 2 },
      ],
      3,
    ),
    ...PUSH_PAIRS.map((pair) => ({ connector: "push", ...pair })),
    { connector: "push", pushLegs: "prefill-first", prefills: 2 } as const,
    { connector: "push", pushLayerwise: true, prefillTp: 2, decodeBlockSize: 32 },
    { connector: "auto", prefills: 2, decodes: 2, decodeTp: 2 },
    ...(isLongRun ? [{ prefills: 2, decodes: 2 }] : []),
  ])("%j", async (pair) => {
    await expectEqual({ transport: "memory", ...pair });
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
});
