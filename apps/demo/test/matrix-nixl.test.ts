import { isLongRun } from "@kv/testing/long-run";
import { describe, expect, it } from "vitest";
import { libfabricAbsence } from "./support/libfabric-absence.js";
import { expectEqual, PAIRS } from "./support/matrix.js";
import { nixlAbsence } from "./support/nixl-absence.js";

const absence = await nixlAbsence();
const noLibfabric = isLongRun ? await libfabricAbsence() : "for the long run";
const because = (why: string | undefined) => (why === undefined ? "" : ` (${why})`);
const LIMIT_MS = 180_000;

const OTHERS = [
  { connector: "push", decodeTp: 2, decodeBlockSize: 32 },
  { connector: "push", prefillTp: 2 },
  { connector: "push", pushLayerwise: true, prefillTp: 2 },
  { connector: "auto" },
] as const;
const STAGED = [
  { decodePlatform: "neuron", prefillTp: 2, decodeBlockSize: 32 },
  { connector: "push", prefillPlatform: "neuron", decodePlatform: "neuron" },
] as const;

describe.skipIf(absence !== undefined)(`tokens and KV over NIXL${because(absence)}`, () => {
  it.each(isLongRun ? [...PAIRS, ...OTHERS] : [PAIRS[3], OTHERS[0]])(
    "%j",
    async (pair) => {
      await expectEqual({ transport: "nixl", ...pair });
    },
    LIMIT_MS,
  );

  it.runIf(isLongRun).each(STAGED)(
    "%j: copies between device and host are measured where they are made",
    async (pair) => {
      for (const { save_ms, load_ms } of await expectEqual({ transport: "nixl", ...pair })) {
        expect(save_ms > 0).toBe("prefillPlatform" in pair);
        expect(load_ms).toBeGreaterThan(0);
      }
    },
    2 * LIMIT_MS,
  );
});

describe.skipIf(noLibfabric)(`tokens and KV over NIXL's LIBFABRIC${because(noLibfabric)}`, () => {
  // Equal sides, and one with different TP and block sizes.
  it.each([PAIRS[0], PAIRS[5]])(
    "%j",
    async (pair) => {
      await expectEqual({ transport: "nixl", backend: "LIBFABRIC", ...pair });
    },
    LIMIT_MS,
  );
});
