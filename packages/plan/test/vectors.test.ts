import { fileURLToPath } from "node:url";
import { expect, test } from "vitest";
import {
  replayBlockIds,
  replayDescriptors,
  replayValidate,
} from "../../../tools/conformance/families.js";
import { judge } from "../../../tools/conformance/outcome.js";
import { readVectors } from "../../../tools/conformance/vector-file.js";

test.each([
  { family: "block_ids", replay: replayBlockIds, atLeast: 700 },
  { family: "descs", replay: replayDescriptors, atLeast: 400 },
  { family: "validate", replay: replayValidate, atLeast: 300 },
])(
  "$family: as vLLM 0.33.0 in every recorded case, or beyond it by a named rule",
  ({ family, replay, atLeast }) => {
    const path = fileURLToPath(new URL(`../fixtures/${family}.jsonl.gz`, import.meta.url));
    const outcomes = readVectors(path, []).map(({ line, vector }) => {
      return {
        line,
        ...(vector === undefined ? { kind: "unread" } : judge(family, replay, vector)),
      };
    });
    expect(outcomes.filter(({ kind }) => kind !== "passed" && kind !== "beyond")).toEqual([]);
    expect(
      outcomes.filter(({ kind }) => kind === "passed" || kind === "beyond").length,
    ).toBeGreaterThan(atLeast);
  },
);
