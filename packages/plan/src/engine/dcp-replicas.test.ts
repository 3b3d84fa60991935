import { KvError } from "@kv/interface";
import { computeTpMapping, type TpMapping } from "@kv/topology";
import { expect, test } from "vitest";
import type { RankGeometry } from "../geometry/rank-geometry.js";
import { sampleRank } from "../sample-pair.test-support.js";
import { readOneReplica } from "./dcp-replicas.js";

interface Engine {
  readonly tpSize: number;
  readonly dcpSize?: number;
}

function sides(tpRank: number, local: Engine, remote: Engine): [TpMapping, RankGeometry, RankGeometry] {
  const mapping = computeTpMapping({
    ...{ tpRank, tpSize: local.tpSize, remoteTpSize: remote.tpSize },
    ...{ dcpSize: local.dcpSize ?? 1, remoteDcpSize: remote.dcpSize ?? 1 },
    ...{ numKvHeads: 1, isMla: true, groups: ["mla", "mla"] },
  });
  return [mapping, sampleRank({ ...local, tpRank }), sampleRank(remote)];
}

/** Of each local rank the remote ranks that it reads, and those that it only tells; and what each remote rank waits for. */
function reads(local: Engine, remote: Engine) {
  return Array.from({ length: local.tpSize }, (_, tpRank) => {
    const made = readOneReplica(...sides(tpRank, local, remote));
    // One latent: every group is read from these ranks, and fills whole blocks.
    expect(made.sourceRanksPerGroup).toEqual([made.attentionRanks, made.attentionRanks]);
    expect(made.allSourceRanks).toEqual(made.attentionRanks);
    expect(made.rankToAttentionSlot).toEqual(
      Object.fromEntries(made.attentionRanks.map((rank) => [rank, 0])),
    );
    return [[...made.attentionRanks], [...made.notifyOnlyRanks], made.localConsumers];
  });
}

test("an engine that is not dealt out is read as it was", () => {
  const given = sides(1, { tpSize: 2, dcpSize: 2 }, { tpSize: 1 });
  expect(readOneReplica(...given)).toBe(given[0]);
});

test("one group of all ranks: every slice is read once, by each rank that needs it", () => {
  expect(reads({ tpSize: 1 }, { tpSize: 2, dcpSize: 2 })).toEqual([[[0, 1], [], 1]]);
  expect(reads({ tpSize: 2 }, { tpSize: 2, dcpSize: 2 })).toEqual([
    [[0, 1], [], 2],
    [[0, 1], [], 2],
  ]);
});

test("of several groups each rank reads one, another than the next rank, and tells the others", () => {
  // Ranks 0 and 1 of the remote hold the slices that ranks 2 and 3 hold too.
  expect(reads({ tpSize: 2 }, { tpSize: 4, dcpSize: 2 })).toEqual([
    [[0, 1], [2, 3], 2],
    [[2, 3], [0, 1], 2],
  ]);
});

test("more readers than copies begin again with the first copy", () => {
  expect(reads({ tpSize: 8, dcpSize: 2 }, { tpSize: 4, dcpSize: 2 })).toEqual(
    [0, 1, 2, 3, 4, 5, 6, 7].map((rank) => {
      const slice = rank % 2;
      const first = Math.floor(rank / 2) % 2 === 0;
      return first ? [[slice], [slice + 2], 4] : [[slice + 2], [slice], 4];
    }),
  );
});

test("a local slice that holds several of the remote's reads them of one group", () => {
  // Slice 0 here is slices 0 and 2 there, slice 1 is 1 and 3; two copies of each.
  expect(reads({ tpSize: 4, dcpSize: 2 }, { tpSize: 8, dcpSize: 4 })).toEqual([
    [[0, 2], [4, 6], 2],
    [[1, 3], [5, 7], 2],
    [[4, 6], [0, 2], 2],
    [[5, 7], [1, 3], 2],
  ]);
});

test("slices that are cut finer here: each rank reads the one that holds its own", () => {
  // Of four local slices two lie in each of the remote's.
  expect(reads({ tpSize: 4, dcpSize: 4 }, { tpSize: 2, dcpSize: 2 })).toEqual([
    [[0], [], 2],
    [[1], [], 2],
    [[0], [], 2],
    [[1], [], 2],
  ]);
});

test("refuses finer slices of an engine with copies, of which some would be told by nobody", () => {
  const attempt = () => readOneReplica(...sides(0, { tpSize: 4, dcpSize: 4 }, { tpSize: 4, dcpSize: 2 }));
  expect(attempt).toThrow(/local DCP 4 of TP 4, remote DCP 2 of TP 4/);
  try {
    attempt();
  } catch (error) {
    expect(KvError.is(error) && error.code).toBe("KV_PLAN_UNSUPPORTED");
  }
});
