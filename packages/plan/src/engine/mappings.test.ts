import { computeTpMapping, type TpMapping } from "@kv/topology";
import { expect, test } from "vitest";
import type { RankGeometry } from "../geometry/rank-geometry.js";
import { refused } from "../refused.test-support.js";
import { sampleRank } from "../sample-pair.test-support.js";
import { readOneReplica } from "./mappings.js";

interface Engine {
  readonly tpSize: number;
  readonly dcpSize?: number;
}

function sides(
  tpRank: number,
  local: Engine,
  remote: Engine,
): [TpMapping, RankGeometry, RankGeometry] {
  const mapping = computeTpMapping({
    tpRank,
    tpSize: local.tpSize,
    remoteTpSize: remote.tpSize,
    dcpSize: local.dcpSize ?? 1,
    remoteDcpSize: remote.dcpSize ?? 1,
    numKvHeads: 1,
    isMla: true,
    groups: ["mla", "mla"],
  });
  return [mapping, sampleRank({ ...local, tpRank }), sampleRank(remote)];
}

/**
 * For each local rank: the remote ranks it reads, those it only notifies, and how many readers a
 * remote rank waits for.
 */
function reads(local: Engine, remote: Engine) {
  return Array.from({ length: local.tpSize }, (_, tpRank) => {
    const made = readOneReplica(...sides(tpRank, local, remote));
    // There is one latent: every group is read from these ranks and fills whole blocks.
    expect(made.sourceRanksPerGroup).toEqual([made.attentionRanks, made.attentionRanks]);
    expect(made.allSourceRanks).toEqual(made.attentionRanks);
    expect(made.rankToAttentionSlot).toEqual(
      Object.fromEntries(made.attentionRanks.map((rank) => [rank, 0])),
    );
    return [[...made.attentionRanks], [...made.notifyOnlyRanks], made.localConsumers];
  });
}

test("returns the mapping unchanged for a remote engine without DCP", () => {
  const given = sides(1, { tpSize: 2, dcpSize: 2 }, { tpSize: 1 });
  expect(readOneReplica(...given)).toBe(given[0]);
});

test.each<[string, Engine, Engine, ReturnType<typeof reads>]>([
  [
    "one DCP group of all remote ranks: the local rank reads every slice once",
    { tpSize: 1 },
    { tpSize: 2, dcpSize: 2 },
    [[[0, 1], [], 1]],
  ],
  [
    "one DCP group of all remote ranks: each local rank reads every slice once",
    { tpSize: 2 },
    { tpSize: 2, dcpSize: 2 },
    [
      [[0, 1], [], 2],
      [[0, 1], [], 2],
    ],
  ],
  [
    // Remote ranks 0 and 1 hold the same slices as ranks 2 and 3.
    "several DCP groups: each local rank reads a different group and notifies the others",
    { tpSize: 2 },
    { tpSize: 4, dcpSize: 2 },
    [
      [[0, 1], [2, 3], 2],
      [[2, 3], [0, 1], 2],
    ],
  ],
  [
    "readers reuse the copies in turn when there are more readers than copies",
    { tpSize: 8, dcpSize: 2 },
    { tpSize: 4, dcpSize: 2 },
    [0, 1, 2, 3, 4, 5, 6, 7].map((rank) => {
      const slice = rank % 2;
      const first = Math.floor(rank / 2) % 2 === 0;
      return first ? [[slice], [slice + 2], 4] : [[slice + 2], [slice], 4];
    }),
  ],
  [
    // Local slice 0 is remote slices 0 and 2, local slice 1 is 1 and 3; each has two copies.
    "a rank whose slice spans several remote slices reads them from one DCP group",
    { tpSize: 4, dcpSize: 2 },
    { tpSize: 8, dcpSize: 4 },
    [
      [[0, 2], [4, 6], 2],
      [[1, 3], [5, 7], 2],
      [[4, 6], [0, 2], 2],
      [[5, 7], [1, 3], 2],
    ],
  ],
  [
    // Each remote slice contains two of the four local slices.
    "finer local slices: each rank reads the remote slice that contains its own",
    { tpSize: 4, dcpSize: 4 },
    { tpSize: 2, dcpSize: 2 },
    [
      [[0], [], 2],
      [[1], [], 2],
      [[0], [], 2],
      [[1], [], 2],
    ],
  ],
])("%s", (_what, local, remote, expected) => {
  expect(reads(local, remote)).toEqual(expected);
});

test("refuses finer local slices of a remote engine with copies, because no reader would notify some copies", () => {
  const attempt = () =>
    readOneReplica(...sides(0, { tpSize: 4, dcpSize: 4 }, { tpSize: 4, dcpSize: 2 }));
  refused(attempt, "KV_PLAN_UNSUPPORTED", "local DCP 4 of TP 4, remote DCP 2 of TP 4");
});
