import { KvError } from "@kv/interface";
import { computeTpMapping } from "@kv/topology";
import { describe, expect, test } from "vitest";
import type { RankGeometry, RegionGeometry } from "../geometry/rank-geometry.js";
import type { Piece } from "../kinds/cache-kind.js";
import { sampleRank } from "../sample-pair.test-support.js";
import type { AlignedRank } from "./align-regions.js";
import type { RegionPiece } from "./segments.js";
import { segmentPlans, sourcePlans } from "./source-plans.js";

interface Change extends Partial<Piece> {
  readonly groups?: readonly number[];
  readonly ranks?: readonly number[];
  readonly heads?: number | undefined;
}

/**
 * A piece of 128 bytes: each source fills its own quarter of the local block from the first quarter
 * of the remote block.
 */
function pieceOf(
  local: RankGeometry,
  remote: RankGeometry,
  index: number,
  change: Change = {},
): RegionPiece {
  const { groups = [0], ranks = [0], heads = 4, ...own } = change;
  const region = local.regions[index] as RegionGeometry;
  return {
    pair: {
      index,
      region,
      remoteRegion: remote.regions[index] ?? region,
      heads,
      attentionGroups: groups,
      stateGroups: [],
      mapping: computeTpMapping({
        tpRank: 0,
        tpSize: 1,
        remoteTpSize: 1,
        numKvHeads: 4,
        isMla: false,
        groups: ["full"],
      }),
    },
    piece: {
      name: "",
      unit: "kernel-block",
      localParts: 1,
      remoteParts: 1,
      lengthBytes: 128,
      local: ({ tpRank }) => ({ offsetBytes: tpRank * 128, partStrideBytes: 128 }),
      remote: () => ({ offsetBytes: 0, partStrideBytes: 128 }),
      ...own,
    },
    groups,
    ranks,
  };
}

/** A rank whose regions have the given memory types, at addresses that no other rank uses. */
function rankOf(
  memory: readonly ("DRAM" | "VRAM")[],
  change: Partial<RankGeometry> = {},
): RankGeometry {
  const rank = sampleRank({ blockLengthBytes: 512, ...change });
  const regions = memory.map((memoryType, index): RegionGeometry => {
    const begin = 65_536 * (index + 1) + 1024 * 1024 * (10 * (change.ppRank ?? 0) + rank.tpRank);
    return {
      ...(rank.regions[0] as RegionGeometry),
      name: `layer.${index}`,
      baseAddress: begin,
      memoryType,
    };
  });
  return { ...rank, regions };
}
const TWO = ["DRAM", "DRAM"] as const;
const all = (rank: RankGeometry): AlignedRank => {
  const indices = [...rank.regions.keys()];
  return { geometry: rank, localRegions: indices, remoteRegions: indices };
};

interface Given {
  readonly pieces: readonly RegionPiece[];
  /** Stages in turn; of each its ranks. Default: one, which holds all regions. */
  readonly stages?: readonly {
    readonly ranks: readonly RankGeometry[];
    readonly aligned: AlignedRank;
  }[];
}

function sourcesOf(local: RankGeometry, remotes: readonly RankGeometry[], given: Given) {
  const { pieces } = given;
  const [remote] = remotes as [RankGeometry];
  const stages = given.stages ?? [{ ranks: remotes, aligned: all(remote) }];
  const model = { numKvHeads: 4, groups: ["full"] };
  const { tpRank, tpSize } = local;
  const main = computeTpMapping({
    tpRank,
    tpSize,
    remoteTpSize: remote.tpSize,
    numKvHeads: 4,
    isMla: false,
    groups: ["full"],
  });
  return sourcePlans({
    context: { local, remote, model, mapping: () => main },
    pieces,
    segments: segmentPlans(
      pieces,
      stages.map(({ aligned }) => aligned),
    ),
    stages: stages.map(({ ranks, aligned }) => ({
      ranks: new Map(ranks.map((rank) => [rank.tpRank, rank])),
      aligned,
    })),
  });
}

const LOCAL = rankOf(TWO);
const remotesOf = (tpSize: number, memory: readonly ("DRAM" | "VRAM")[] = TWO) =>
  Array.from({ length: tpSize }, (_, tpRank) => rankOf(memory, { tpRank, tpSize }));

describe("segments", () => {
  test("have their remote region and their list", () => {
    const local = rankOf(["DRAM", "DRAM", "VRAM", "DRAM"]);
    const remote = rankOf(["DRAM", "VRAM", "DRAM", "DRAM"]);
    const pieces = [0, 1, 2, 3].map((index) =>
      pieceOf(local, remote, index, {
        name: `piece ${index}`,
        localParts: 2,
        remoteParts: index + 1,
      }),
    );
    const stages: AlignedRank[] = [
      { geometry: remote, localRegions: [0, 3], remoteRegions: [5, 4] },
      { geometry: remote, localRegions: [1, 2], remoteRegions: [1, 0] },
    ];
    const plans = segmentPlans(pieces, stages);
    expect(plans.map(({ region, remoteRegion, list }) => [region, remoteRegion, list])).toEqual([
      [0, 5, 0],
      [1, 1, 1],
      [2, 0, 2],
      [3, 4, 0],
    ]);
    expect(plans[1]).toEqual({
      region: 1,
      remoteRegion: 1,
      list: 1,
      piece: "piece 1",
      unit: "kernel-block",
      localParts: 2,
      remoteParts: 2,
      lengthBytes: 128,
    });
  });
});

describe("sources of a read", () => {
  test("each source has its own tables, and all sources have the same local indexing", () => {
    const remotes = remotesOf(2);
    const pieces = [0, 1].map((index) =>
      pieceOf(LOCAL, remotes[0] as RankGeometry, index, { ranks: [0, 1] }),
    );
    const { plans, localIndexing } = sourcesOf(LOCAL, remotes, { pieces });
    const offsets = [0, 10].map((offset) => ({ offset, count: 10, blockStep: 1, partStep: 1 }));
    expect(localIndexing).toEqual(offsets);
    expect(
      plans.map(({ remoteRank, remotePpRank, groups, segments, remoteIndexing }) => [
        remoteRank,
        remotePpRank,
        groups,
        segments,
        remoteIndexing,
      ]),
    ).toEqual([
      [0, 0, [0], [0, 1], offsets],
      [1, 0, [0], [0, 1], offsets],
    ]);
    const [, second] = plans;
    expect([...(second?.localTable.rows ?? [])]).toEqual([
      65_536 + 128,
      128,
      0,
      512,
      10,
      131_072 + 128,
      128,
      0,
      512,
      10,
    ]);
    expect([...(second?.remoteTable.rows ?? [])]).toEqual([
      65_536 + 1024 * 1024,
      128,
      0,
      512,
      10,
      131_072 + 1024 * 1024,
      128,
      0,
      512,
      10,
    ]);
    expect(second?.localTable).toBe(second?.lists[0]?.localTable);
    expect(second?.remoteTable).toBe(second?.lists[0]?.remoteTable);
  });

  test("are the ranks of all pieces in ascending order, each with its own pieces", () => {
    const remotes = remotesOf(4);
    const pieces = [
      pieceOf(LOCAL, remotes[0] as RankGeometry, 0, { groups: [2, 1], ranks: [2, 0] }),
      pieceOf(LOCAL, remotes[0] as RankGeometry, 1, { groups: [0, 1], ranks: [1, 2] }),
    ];
    const { plans } = sourcesOf(LOCAL, remotes, { pieces });
    expect(plans.map(({ remoteRank, segments, groups }) => [remoteRank, segments, groups])).toEqual(
      [
        [0, [0], [1, 2]],
        [1, [1], [0, 1]],
        [2, [0, 1], [0, 1, 2]],
      ],
    );
    // The other's rows are in the tables all the same, so that indices are equal.
    expect(
      plans.map(({ localTable, remoteTable }) => [localTable.rows.length, remoteTable.rows.length]),
    ).toEqual([0, 1, 2].map(() => [10, 10]));
  });

  test("unlike memory types have lists of their own, and indices within them", () => {
    const memory = ["DRAM", "VRAM", "DRAM"] as const;
    const local = rankOf(memory);
    const remote = rankOf(["DRAM", "DRAM", "DRAM"]);
    const pieces = [0, 1, 2].map((index) => pieceOf(local, remote, index));
    const { plans, localIndexing } = sourcesOf(local, [remote], { pieces });
    expect(localIndexing.map(({ offset }) => offset)).toEqual([0, 0, 10]);
    expect(plans[0]?.remoteIndexing.map(({ offset }) => offset)).toEqual([0, 0, 10]);
    const lists = plans[0]?.lists.map(
      ({ localMemoryType, remoteMemoryType, localTable, remoteTable }) => [
        localMemoryType,
        remoteMemoryType,
        localTable.memoryType,
        remoteTable.memoryType,
        [localTable, remoteTable].map(({ rows }) => [...rows].filter((_, at) => at % 5 === 0)),
      ],
    );
    expect(lists).toEqual([
      [
        "DRAM",
        "DRAM",
        "DRAM",
        "DRAM",
        [
          [65_536, 196_608],
          [65_536, 196_608],
        ],
      ],
      ["VRAM", "DRAM", "VRAM", "DRAM", [[131_072], [131_072]]],
    ]);
  });

  test("each pipeline stage has remote rows of its layers and all local rows", () => {
    const [one, two] = [rankOf(["DRAM"], { ppRank: 0 }), rankOf(["DRAM"], { ppRank: 1 })] as const;
    const stage = (geometry: RankGeometry, region: number) => ({
      ranks: [geometry],
      aligned: { geometry, localRegions: [region], remoteRegions: [0] },
    });
    const pieces = [0, 1].map((index) => pieceOf(LOCAL, one, index));
    const { plans } = sourcesOf(LOCAL, [one], { pieces, stages: [stage(one, 0), stage(two, 1)] });
    const nowhere = { offset: 0, count: 0, blockStep: 0, partStep: 0 };
    const here = { offset: 0, count: 10, blockStep: 1, partStep: 1 };
    expect(
      plans.map(({ remotePpRank, segments, remoteIndexing }) => [
        remotePpRank,
        segments,
        remoteIndexing,
      ]),
    ).toEqual([
      [0, [0], [here, nowhere]],
      [1, [1], [nowhere, here]],
    ]);
    expect(plans.map(({ localTable }) => localTable.rows.length)).toEqual([10, 10]);
    expect(plans.map(({ remoteTable }) => [...remoteTable.rows])).toEqual([
      [65_536, 128, 0, 512, 10],
      [65_536 + 10 * 1024 * 1024, 128, 0, 512, 10],
    ]);
  });

  test("a rank that is missing in a stage is not a source", () => {
    const remotes = remotesOf(2);
    const pieces = [pieceOf(LOCAL, remotes[0] as RankGeometry, 0, { ranks: [0, 1] })];
    expect(
      sourcesOf(LOCAL, remotes.slice(0, 1), { pieces }).plans.map(({ remoteRank }) => remoteRank),
    ).toEqual([0]);
  });

  test("a state's offset depends on its rank's position among the ranks that fill the block", () => {
    // Rank 1 of two faces ranks 2 and 3 of four.
    const local = rankOf(TWO, { tpRank: 1, tpSize: 2 });
    const remotes = remotesOf(4);
    const state: Change = {
      unit: "logical-block",
      ranks: [2, 3],
      local: ({ stateIndex }) => ({ offsetBytes: stateIndex * 64, partStrideBytes: 0 }),
    };
    const pieces = [pieceOf(local, remotes[0] as RankGeometry, 0, state)];
    const { plans } = sourcesOf(local, remotes, { pieces });
    const begin = 65_536 + 1024 * 1024;
    expect(plans.map(({ remoteRank, localTable }) => [remoteRank, localTable.rows[0]])).toEqual([
      [2, begin],
      [3, begin + 64],
    ]);
  });

  test("part strides follow each side's own layout", () => {
    const remote = rankOf(TWO);
    const parts: Change = {
      localParts: 2,
      remoteParts: 4,
      local: () => ({ offsetBytes: 0, partStrideBytes: 256 }),
      remote: () => ({ offsetBytes: 0, partStrideBytes: 128 }),
    };
    const pieces = [0, 1].map((index) => pieceOf(LOCAL, remote, index, parts));
    const { plans, localIndexing } = sourcesOf(LOCAL, [remote], { pieces });
    expect(localIndexing).toEqual(
      [0, 20].map((offset) => ({ offset, count: 20, blockStep: 2, partStep: 1 })),
    );
    expect(plans[0]?.remoteIndexing).toEqual(
      [0, 40].map((offset) => ({ offset, count: 40, blockStep: 4, partStep: 1 })),
    );
    expect([...(plans[0]?.localTable.rows ?? [])]).toEqual([
      65_536, 128, 0, 256, 20, 131_072, 128, 0, 256, 20,
    ]);
    expect([...(plans[0]?.remoteTable.rows ?? [])]).toEqual([
      65_536, 128, 0, 128, 40, 131_072, 128, 0, 128, 40,
    ]);
  });

  test("refuses 2^31 descriptors and accepts 2^31 - 1", () => {
    const wide = (counts: readonly number[]) => {
      const rank = rankOf(TWO);
      return {
        ...rank,
        regions: rank.regions.map((one, index) => ({ ...one, numBlocks: counts[index] ?? 0 })),
      };
    };
    const attempt = (counts: readonly number[]) => {
      const local = wide(counts);
      const pieces = [0, 1].map((index) => pieceOf(local, local, index));
      return sourcesOf(local, [local], { pieces }).localIndexing.map(({ count }) => count);
    };
    expect(attempt([2 ** 31 - 2, 1])).toEqual([2 ** 31 - 2, 1]);
    expect(() => attempt([2 ** 31 - 2, 2])).toThrow(
      /rank 0: 2147483648 descriptors .* at most 2147483647/,
    );
    try {
      attempt([2 ** 31 - 2, 2]);
    } catch (error) {
      expect(KvError.is(error) && error.code).toBe("KV_PLAN_UNSUPPORTED");
    }
  });
});

describe("the key of a local list", () => {
  const keyOf = (pieces: readonly RegionPiece[]) =>
    sourcesOf(LOCAL, [LOCAL], { pieces }).plans[0]?.localListKey;
  const one = (index: number, change: Change = {}) => pieceOf(LOCAL, LOCAL, index, change);
  const halves = (partStrideBytes: number): Change => ({
    localParts: 2,
    local: () => ({ offsetBytes: 0, partStrideBytes }),
  });
  const second: Change = { local: () => ({ offsetBytes: 256, partStrideBytes: 0 }) };

  test.each<[string, readonly RegionPiece[], string]>([
    ["equal pieces in all regions", [one(0), one(1)], "list 0: 128@0"],
    ["equal pieces in another region order", [one(1), one(0)], "list 0: 128@0"],
    ["one of the regions", [one(1)], "list 0: 128@0 = 1:0"],
    [
      "several pieces of each",
      [one(0), one(0, second), one(1), one(1, second)],
      "list 0: 128@0 128@256",
    ],
    ["different pieces per region", [one(0), one(1, second)], "list 0: 128@0 | 128@256 = 0:0,1:1"],
    ["parts", [one(0, halves(256)), one(1, halves(256))], "list 0: 128@0/2*256"],
    [
      "parts with another stride",
      [one(0, halves(128)), one(1, halves(128))],
      "list 0: 128@0/2*128",
    ],
    [
      "states",
      [one(0, { unit: "logical-block" }), one(1, { unit: "logical-block" })],
      "list 0: state 128@0",
    ],
  ])("names %s", (_what, pieces, key) => {
    expect(keyOf(pieces)).toBe(key);
  });

  test("lists of different memory types have different keys", () => {
    const local = rankOf(["DRAM", "VRAM"]);
    const pieces = [0, 1].map((index) => pieceOf(local, local, index));
    const lists = sourcesOf(local, [local], { pieces }).plans[0]?.lists.map(
      ({ localListKey }) => localListKey,
    );
    expect(lists).toEqual(["list 0: 128@0 = 0:0", "list 1: 128@0 = 1:0"]);
  });
});
