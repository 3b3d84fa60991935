import { describePlugins, findLibrary } from "@kv/nixl";
import { describe, it } from "vitest";
import { expectEqual, PAIRS } from "./matrix.js";
import { nixlAbsence } from "./nixl-here.js";

const absence = (await nixlAbsence()) ?? (await libfabricAbsence());

async function libfabricAbsence(): Promise<string | undefined> {
  const [plugin] = await describePlugins({ libraryPath: await findLibrary(), names: ["LIBFABRIC"] });
  return plugin?.loads === true ? undefined : (plugin?.remedy ?? "NIXL has no LIBFABRIC plugin");
}

/** Two of the pairs: equal halves, and one that changes both the number of ranks and the size of blocks. */
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
