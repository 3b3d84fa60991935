import { someOf } from "@kv/testing/long-run";
import { describe, it } from "vitest";
import { expectEqual } from "./support/matrix.js";

/** Enough for the longest prompt but not for all prompts, so that requests wait for blocks. */
const STAGING_BLOCKS = 24;

describe("tokens and KV with a simulated Neuron device, a staging pool smaller than the requests", () => {
  const pairs = [
    { prefillPlatform: "neuron", prefillTp: 2, decodeBlockSize: 32 },
    { prefillPlatform: "neuron" },
    { decodePlatform: "neuron", decodeTp: 2 },
    { connector: "push", decodePlatform: "neuron", prefillTp: 2, decodeBlockSize: 32 },
    { prefillPlatform: "neuron", decodePlatform: "neuron", decodeTp: 2, decodeBlockSize: 32 },
    { connector: "push", prefillPlatform: "neuron", decodeTp: 2 },
    { connector: "auto", prefillPlatform: "neuron", decodePlatform: "neuron" },
  ] as const;
  it.each(someOf(pairs, 3))("%j", async (options) => {
    await expectEqual({ transport: "memory", stagingBlocks: STAGING_BLOCKS, ...options });
  });
});
