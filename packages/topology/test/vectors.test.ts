import { fileURLToPath } from "node:url";
import { expect, test } from "vitest";
import { replayTpMapping } from "../../../tools/conformance/families.js";
import { judge } from "../../../tools/conformance/outcome.js";
import { readVectors } from "../../../tools/conformance/vector-file.js";

test("the mapping is that of vLLM 0.33.0 in every recorded case", () => {
  const path = fileURLToPath(new URL("../fixtures/tp_mapping.jsonl.gz", import.meta.url));
  const cases = readVectors(path, []);
  expect(cases.length).toBeGreaterThan(1000);
  const failures = cases.flatMap(({ line, vector }) => {
    const outcome = vector === undefined ? undefined : judge("tp_mapping", replayTpMapping, vector);
    return outcome?.kind === "passed" ? [] : [`line ${line}: ${JSON.stringify(outcome)}`];
  });
  expect(failures).toEqual([]);
});
