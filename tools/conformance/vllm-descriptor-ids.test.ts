import { fileURLToPath } from "node:url";
import { expect, test } from "vitest";
import { replayDescriptorIds } from "./families.js";
import { judge } from "./outcome.js";
import { readVectors } from "./vector-file.js";
import { computeDescriptorIds } from "./vllm-descriptor-ids.js";

test.each(["full", "mamba"] as const)(
  "refuses kernel blocks that do not fill logical ones, and a block beyond its region: %s",
  (kind) => {
    const attention = { groups: [kind], numRegions: 1, regionGroupIds: [0] };
    const given = { ...attention, stateSpace: { convProjections: 3 } };
    expect(() =>
      computeDescriptorIds({
        ...given,
        blockIds: [[4]],
        numBlocks: 13,
        physicalBlocksPerLogical: 3,
      }),
    ).toThrow("13 kernel blocks do not divide into logical blocks of 3");
    expect(() => computeDescriptorIds({ ...given, blockIds: [[4, 40]], numBlocks: 10 })).toThrow(
      "block 40 is not one of 10 blocks",
    );
  },
);

// packages/plan/test/vectors.test.ts does the same with the functions of block ids.
test("equals vLLM 0.33.0's _compute_desc_ids in every recorded case", () => {
  const path = fileURLToPath(new URL("./fixtures/desc_ids.jsonl.gz", import.meta.url));
  const outcomes = readVectors(path, []).map(({ line, vector }) => ({
    line,
    ...(vector === undefined ? { kind: "unread" } : judge("desc_ids", replayDescriptorIds, vector)),
  }));
  expect(outcomes.filter(({ kind }) => kind !== "passed")).toEqual([]);
  expect(outcomes.length).toBeGreaterThan(1000);
});
