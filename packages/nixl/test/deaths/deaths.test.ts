import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { describe, expect, test } from "vitest";
import { libfabricMissing } from "../support/libfabric-available.js";
import { ALL_CELLS, type Cell, ENDINGS, nameOf, PAIRWISE, PHASES, ROUTES } from "./cells.js";
import { type CellResult, runCells } from "./run-cells.js";

const pairs = (cells: readonly Cell[]) =>
  new Set(
    cells.flatMap(({ route, ending, phase }) => [
      `${route} ${ending}`,
      `${route} ${phase}`,
      `${ending} ${phase}`,
    ]),
  );

/** nixl.md N1: a peer that ended politely over LIBFABRIC hung the reader's agent for good. */
describe.skipIf(nixlMissing)(`N1: no end of a peer stops an agent (${nixlMissing ?? "found"})`, () => {
  test("the short choice has every pair of the matrix", () => {
    expect(pairs(PAIRWISE)).toEqual(pairs(ALL_CELLS));
    expect(ALL_CELLS.length).toBe(ENDINGS.length * PHASES.length * ROUTES.length);
  });

  test("its transfers fail in their time, other peers go on, and nothing is left", {
    timeout: 240_000,
  }, async () => {
    const cells = PAIRWISE.filter(({ route }) => route !== "libfabric-tcp" || libfabricMissing === undefined);
    const results: CellResult[] = [];
    await runCells(cells, (result) => results.push(result));
    expect(results.filter(({ problems }) => problems.length > 0)).toEqual([]);
    expect(results.map(({ cell }) => cell).sort()).toEqual(cells.map(nameOf).sort());
  });
});
