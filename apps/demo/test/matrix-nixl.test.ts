import { isLongRun } from "@kv/testing/long-run";
import { describe, it } from "vitest";
import { expectEqual, PAIRS } from "./support/matrix.js";
import { nixlAbsence } from "./support/nixl-absence.js";

const absence = await nixlAbsence();

describe.skipIf(absence !== undefined)(
  `tokens and KV over NIXL${absence === undefined ? "" : ` (${absence})`}`,
  () => {
    it.each(isLongRun ? PAIRS : [PAIRS[3]])(
      "TP $prefillTp→$decodeTp, block $prefillBlockSize→$decodeBlockSize",
      async (pair) => {
        await expectEqual({ transport: "nixl", ...pair });
      },
      180_000,
    );

    const others = [
      { connector: "push", prefillTp: 2, decodeTp: 1, prefillBlockSize: 16, decodeBlockSize: 16 },
      { connector: "push", prefillTp: 1, decodeTp: 2, prefillBlockSize: 16, decodeBlockSize: 32 },
      {
        connector: "push",
        pushLayerwise: true,
        prefillTp: 2,
        decodeTp: 1,
        prefillBlockSize: 16,
        decodeBlockSize: 16,
      },
      { connector: "auto", prefillTp: 1, decodeTp: 1, prefillBlockSize: 16, decodeBlockSize: 16 },
    ];
    it.each(isLongRun ? others : others.slice(1, 2))(
      "$connector, TP $prefillTp→$decodeTp, block $prefillBlockSize→$decodeBlockSize",
      async (pair) => {
        await expectEqual({ transport: "nixl", ...pair });
      },
      180_000,
    );
  },
);
