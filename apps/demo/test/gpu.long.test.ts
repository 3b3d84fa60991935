// A long suite: the matrix in the memory of a stand-in for a GPU.
import { existsSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { isLongRun, someOf } from "@kv/testing/long-run";
import { fakeCudaMissing } from "@kv/testing/nixl/fake-cuda";
import { fakeMissing } from "@kv/testing/nixl/fake-nixl";
import { bundled } from "@kv/testing/node-programs";
import { describe, expect, it } from "vitest";
import { expectEqual } from "./support/matrix.js";
import { nixlAbsence } from "./support/nixl-absence.js";
import { ended, startDemo } from "./support/run-demo.js";

const PAIRS = [
  // The second configuration of vllm-neuron's issue 26: blocks of a Neuron P, staged in host
  // memory, go into D's GPU memory.
  { prefillPlatform: "neuron", decodePlatform: "cuda", decodeTp: 2, decodeBlockSize: 32 },
  {
    connector: "push",
    prefillPlatform: "cuda",
    decodePlatform: "cuda",
    prefillTp: 2,
    decodeBlockSize: 32,
  },
  { decodePlatform: "cuda" },
  { prefillPlatform: "cuda", decodePlatform: "cuda", prefillTp: 2 },
  { connector: "push", decodePlatform: "cuda", decodeTp: 2 },
  { prefillPlatform: "cuda", prefillBlockSize: 32, decodeBlockSize: 16 },
] as const;

describe("tokens and KV with caches in simulated device memory, over the embedded transport", () => {
  it.each(someOf(PAIRS, 2))("%j", async (pair) => {
    await expectEqual({ transport: "memory", ...pair });
  });
});

const noStandIns = fakeMissing ?? fakeCudaMissing;
describe.skipIf(noStandIns)(
  `tokens and KV with caches in GPU memory, with stand-ins for NIXL and the CUDA driver (${noStandIns ?? "found"})`,
  () => {
    const standIn = fileURLToPath(new URL("support/gpu-stand-in.ts", import.meta.url));
    it.each(isLongRun ? PAIRS : PAIRS.slice(0, 2))("%j", async (pair) => {
      const transportModule = await bundled(standIn);
      await expectEqual({ transport: "module", transportModule, ...pair });
    });
  },
);

const hasGpu = existsSync("/dev/nvidia0");
const noNixl = hasGpu ? await nixlAbsence() : "no GPU here: there is no /dev/nvidia0";
describe.skipIf(noNixl)(`tokens and KV with caches in GPU memory (${noNixl ?? "found"})`, () => {
  it.each(PAIRS)(
    "%j",
    async (pair) => {
      await expectEqual({ transport: "nixl", ...pair });
    },
    180_000,
  );
});

it.skipIf(hasGpu)("without a GPU the demo says so, and lists what the machine has", async () => {
  const { code, stderr } = await ended(startDemo(["--decode-platform", "cuda"]));
  expect(stderr).toMatch(
    /kv_buffer_device "cuda" needs a GPU: there is no \/dev\/nvidia0\. This machine has \d+ CPU cores/,
  );
  expect(code).toBe(2);
});
