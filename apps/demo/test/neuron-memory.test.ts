import { describe, it } from "vitest";
import { expectEqual } from "./matrix.js";

/** Enough for the longest prompt of the run, and not for all: requests wait for one another's blocks. */
const STAGING_BLOCKS = 24;

describe("tokens and KV with a simulated Neuron device, a staging pool smaller than the requests", () => {
  it("Neuron → CPU", async () => {
    await expectEqual({ transport: "memory", prefillPlatform: "neuron", stagingBlocks: STAGING_BLOCKS });
  });

  it("Neuron on both sides, TP 1→2, block 16→32", async () => {
    await expectEqual({
      transport: "memory",
      prefillPlatform: "neuron",
      decodePlatform: "neuron",
      prefillTp: 1,
      decodeTp: 2,
      prefillBlockSize: 16,
      decodeBlockSize: 32,
      stagingBlocks: STAGING_BLOCKS,
    });
  });
});
