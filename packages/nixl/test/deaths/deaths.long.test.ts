// A long suite: ends a peer in each phase over each route; npm run test:long -- --only deaths has
// more.
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { describe, expect, test } from "vitest";
import { libfabricMissing } from "../support/libfabric-available.js";
import {
  ALL_CELLS,
  BY_PEER,
  type Cell,
  ENDINGS,
  isByPeer,
  nameOf,
  PAIRWISE,
  PEER_PHASES,
  PHASES,
  ROUTES,
} from "./cells.js";
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
describe.skipIf(nixlMissing)(
  `N1: no end of a peer stops an agent (${nixlMissing ?? "found"})`,
  () => {
    test("the short choices have every pair of the matrix in which the agent acts, and every ending and phase in which the peer acts", () => {
      expect(pairs(PAIRWISE)).toEqual(pairs(ALL_CELLS.filter((cell) => !isByPeer(cell))));
      expect(BY_PEER.every(isByPeer)).toBe(true);
      expect(new Set(BY_PEER.map(({ phase }) => phase)).size).toBe(PEER_PHASES.length);
      expect(new Set(BY_PEER.map(({ ending }) => ending)).size).toBe(ENDINGS.length);
      expect(new Set(BY_PEER.map(({ route }) => route)).size).toBe(ROUTES.length);
      expect(ALL_CELLS.length).toBe(
        ENDINGS.length * (PHASES.length + PEER_PHASES.length) * ROUTES.length,
      );
    });

    const run = async (wanted: readonly Cell[]) => {
      const cells = wanted.filter(
        ({ route }) => route !== "libfabric-tcp" || libfabricMissing === undefined,
      );
      const results: CellResult[] = [];
      await runCells(cells, (result) => results.push(result));
      expect(results.filter(({ problems }) => problems.length > 0)).toEqual([]);
      expect(results.map(({ cell }) => cell).sort()).toEqual(cells.map(nameOf).sort());
    };

    test(
      "its transfers fail in their time, other peers go on, and nothing is left",
      {
        timeout: 240_000,
      },
      () => run(PAIRWISE),
    );

    test(
      "a peer that dies while it reads from the agent, writes to it or notifies it does not end the process",
      {
        timeout: 240_000,
      },
      () => run(BY_PEER),
    );
  },
);
