import { fileURLToPath } from "node:url";
import { expect, test } from "vitest";
import { judge } from "../../../tools/conformance/outcome.js";
import { replayTpMapping } from "../../../tools/conformance/tp-mapping.js";
import { readVectors } from "../../../tools/conformance/vector-file.js";
import * as topology from "../src/index.js";

test("the mapping is that of vLLM 0.33.0 in every recorded case", () => {
  const path = fileURLToPath(new URL("../fixtures/tp_mapping.jsonl.gz", import.meta.url));
  const cases = readVectors(path, []);
  expect(cases.length).toBeGreaterThan(1000);
  const replay = replayTpMapping(topology);
  const failures = cases.flatMap(({ line, vector }) => {
    const outcome = vector === undefined ? undefined : judge("tp_mapping", replay, vector);
    return outcome?.kind === "passed" ? [] : [`line ${line}: ${JSON.stringify(outcome)}`];
  });
  expect(failures).toEqual([]);
});
