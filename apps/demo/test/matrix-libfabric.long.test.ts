// A long suite: the matrix over LIBFABRIC; matrix-nixl.test.ts has it over UCX.
import { describe, it } from "vitest";
import { libfabricAbsence } from "./support/libfabric-absence.js";
import { expectEqual, PAIRS } from "./support/matrix.js";

const absence = await libfabricAbsence();

/** Two of the pairs: equal sides, and one with different TP and block sizes. */
const HERE = [PAIRS[0], PAIRS[5]];

describe.skipIf(absence !== undefined)(
  `tokens and KV over NIXL's LIBFABRIC${absence === undefined ? "" : ` (${absence})`}`,
  () => {
    it.each(HERE)(
      "TP $prefillTp→$decodeTp, block $prefillBlockSize→$decodeBlockSize",
      async (pair) => {
        await expectEqual({ transport: "nixl", backend: "LIBFABRIC", ...pair });
      },
      180_000,
    );
  },
);
