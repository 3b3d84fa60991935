import { KvError, type KvErrorCode } from "@kv/interface";
import { describe, expect, test } from "vitest";
import { buildEngineTransferPlan, type EngineTransferPlan } from "../engine/engine-plan.js";
import type { RankGeometry } from "../geometry/rank-geometry.js";
import { provePlan } from "../prove/prove-plan.js";
import type { ReceivePassGroup } from "../receive/build-receive-pass.js";
import { sampleRank } from "../sample-pair.test-support.js";
import { applyDcpPrefixCaching, pairDcp } from "./dcp-blocks.js";
import type { RequestBlocks } from "./request-checks.js";
import { planRequest } from "./request-plan.js";
import { requestShape } from "./request-shape.js";
import { rowsOfRuns } from "./runs.js";

interface Dealt {
  readonly local?: Parameters<typeof sampleRank>[0];
  readonly remote?: Partial<RankGeometry>;
  readonly groups?: readonly string[];
  readonly masksUncovered?: boolean;
}

/** Latents in blocks of 16 tokens; the remote's are dealt out to two ranks. */
function planOf({
  local = {},
  remote = {},
  groups = ["mla"],
  masksUncovered = false,
}: Dealt = {}): EngineTransferPlan {
  const theirs = { tpSize: 2, dcpSize: 2, ...remote };
  const regions = (rank: RankGeometry) => ({
    ...rank,
    regions:
      groups.length === 1
        ? rank.regions
        : rank.regions.map((one, groupId) => ({ ...one, groupId })),
  });
  return buildEngineTransferPlan({
    local: regions(sampleRank({ blockLengthBytes: 1024, ...local })),
    remotes: Array.from({ length: theirs.tpSize }, (_, tpRank) =>
      regions(sampleRank({ blockLengthBytes: 1024, ...theirs, tpRank })),
    ).filter(({ tpRank, dcpSize = 1 }) => {
      const [mine, rank] = [local.dcpSize ?? 1, local.tpRank ?? 0];
      return mine > dcpSize ? tpRank === rank % dcpSize : tpRank % mine === rank % mine;
    }),
    numKvHeads: 1,
    groups,
    masksUncovered,
  });
}

const remotesOf = () =>
  [0, 1].map((tpRank) => sampleRank({ blockLengthBytes: 1024, tpSize: 2, dcpSize: 2, tpRank }));

/** By source, the rows of each of its batches; and the pass in plain numbers. */
function pairsOf(plan: EngineTransferPlan, blocks: RequestBlocks) {
  const pass: ReceivePassGroup[] = [];
  const sources = pairDcp(plan, requestShape(plan), blocks, pass);
  return {
    rows: sources.map((batches) =>
      batches.map((batch) => (batch === undefined ? undefined : [...rowsOfRuns(batch.runs)])),
    ),
    pass: pass.map(({ group, permuteBlockIds, zeroBlockIds, ...rest }) => {
      expect(permuteBlockIds).toHaveLength(0);
      return { group, zero: [...zeroBlockIds], ...rest };
    }),
  };
}

describe("local rank without DCP, remote DCP 2", () => {
  // Block k of the sequence is on rank k mod 2, at index floor(k / 2).
  test("each source has every second block", () => {
    const blocks = { localBlockIds: [[5, 6, 7, 8, 9]], remoteBlockIds: [[1, 2, 3]], numTokens: 77 };
    expect(pairsOf(planOf(), blocks)).toStrictEqual({
      rows: [[[5, 1, 1, 7, 2, 1, 9, 3, 1]], [[6, 1, 1, 8, 2, 1]]],
      // 64 tokens are before block 9.
      pass: [{ group: 0, zero: [], partialBlock: { blockId: 9, fromToken: 13 } }],
    });
  });

  test("skips a prefix hit of two blocks, and full blocks need no pass", () => {
    const blocks = {
      localBlockIds: [[7, 8, 9]],
      remoteBlockIds: [[1, 2, 3]],
      numTokens: 80,
      localComputedBlocks: [2],
    };
    expect(pairsOf(planOf(), blocks)).toStrictEqual({
      rows: [[[7, 2, 1, 9, 3, 1]], [[8, 2, 1]]],
      pass: [],
    });
  });

  test("orders the rows by local block", () => {
    const blocks = { localBlockIds: [[9, 0, 3, 1, 4]], remoteBlockIds: [[5, 1, 2]], numTokens: 80 };
    expect(pairsOf(planOf(), blocks).rows).toStrictEqual([
      [[3, 1, 2, 9, 5, 1]],
      [[0, 5, 1, 1, 1, 1]],
    ]);
  });

  test("a source without blocks has nothing to read", () => {
    expect(
      pairsOf(planOf(), { localBlockIds: [[4]], remoteBlockIds: [[1]], numTokens: 16 }),
    ).toStrictEqual({
      rows: [[[4, 1, 1]], [undefined]],
      pass: [],
    });
  });

  test("zeroes the blocks that the remote lacks when numTokens is unknown", () => {
    const blocks = {
      localBlockIds: [[5, 6, 7, 8]],
      remoteBlockIds: [[1]],
      localComputedBlocks: [0],
    };
    expect(pairsOf(planOf(), blocks)).toStrictEqual({
      rows: [[[5, 1, 1]], [[6, 1, 1]]],
      pass: [{ group: 0, zero: [7, 8] }],
    });
  });

  test("zeroes nothing when the engine masks", () => {
    const plan = planOf({ masksUncovered: true });
    expect(
      pairsOf(plan, { localBlockIds: [[5, 6]], remoteBlockIds: [[1]], numTokens: 20 }).pass,
    ).toStrictEqual([]);
  });

  test("moves the kernel blocks of a logical block together", () => {
    const two = { physicalBlocksPerLogical: 2 };
    const plan = planOf({ local: two, remote: two });
    const blocks = { localBlockIds: [[3, 4]], remoteBlockIds: [[1]] };
    const rows = [[[6, 2, 2]], [[8, 2, 2]]];
    // Block 4 holds the tokens from 32 on, 16 in each of its kernel blocks.
    expect(pairsOf(plan, { ...blocks, numTokens: 50 })).toStrictEqual({
      rows,
      pass: [{ group: 0, zero: [], partialBlock: { blockId: 9, fromToken: 2 } }],
    });
    expect(pairsOf(plan, { ...blocks, numTokens: 40 })).toStrictEqual({
      rows,
      pass: [{ group: 0, zero: [9], partialBlock: { blockId: 8, fromToken: 8 } }],
    });
    expect(pairsOf(plan, { ...blocks, numTokens: 48 })).toStrictEqual({
      rows,
      pass: [{ group: 0, zero: [9] }],
    });
  });

  test("equal logical blocks with larger local kernel blocks", () => {
    const plan = planOf({
      local: { kernelBlockSize: 32, blockLengthBytes: 2048 },
      remote: { physicalBlocksPerLogical: 2 },
    });
    // In parts of 16 tokens, two to a block on either side.
    const blocks = { localBlockIds: [[3, 4]], remoteBlockIds: [[1]], numTokens: 50 };
    expect(pairsOf(plan, blocks)).toStrictEqual({
      rows: [[[6, 2, 2]], [[8, 2, 2]]],
      pass: [{ group: 0, zero: [], partialBlock: { blockId: 4, fromToken: 18 } }],
    });
  });

  test("leaves out groups without blocks, and keeps block ids per group", () => {
    const plan = planOf({ groups: ["mla", "mla"] });
    const blocks = {
      localBlockIds: [[], [2, 3]],
      remoteBlockIds: [[1], [7]],
      numTokens: 32,
      localComputedBlocks: [9, 0],
    };
    expect(pairsOf(plan, blocks)).toStrictEqual({
      rows: [
        [undefined, [2, 7, 1]],
        [undefined, [3, 7, 1]],
      ],
      pass: [],
    });
    // The same number in two groups is two blocks.
    const both = { localBlockIds: [[2], [2]], remoteBlockIds: [[1], [7]], numTokens: 9 };
    expect(pairsOf(plan, both)).toStrictEqual({
      rows: [
        [
          [2, 1, 1],
          [2, 7, 1],
        ],
        [undefined, undefined],
      ],
      pass: [0, 1].map((group) => ({
        group,
        zero: [],
        partialBlock: { blockId: 2, fromToken: 9 },
      })),
    });
  });
});

describe("DCP on both sides", () => {
  test("rank 1 of two reads the second slice", () => {
    // Blocks 1 and 3 of the sequence; the tokens from 48 on are in the latter.
    const plan = planOf({ local: { tpSize: 2, tpRank: 1, dcpSize: 2 } });
    expect(
      pairsOf(plan, { localBlockIds: [[5, 6]], remoteBlockIds: [[1, 3]], numTokens: 60 }),
    ).toStrictEqual({
      rows: [[[5, 1, 1, 6, 3, 1]]],
      pass: [{ group: 0, zero: [], partialBlock: { blockId: 6, fromToken: 12 } }],
    });
  });

  test("zeroes the slice's blocks after the last token instead of reading them", () => {
    // 40 tokens are blocks 0, 1 and half of 2.
    const blocks = {
      localBlockIds: [[5, 6, 7]],
      remoteBlockIds: [[1, 3]],
      numTokens: 40,
      localComputedBlocks: [0],
    };
    const ranks = [0, 1].map((tpRank) =>
      pairsOf(planOf({ local: { tpSize: 2, tpRank, dcpSize: 2 } }), blocks),
    );
    expect(ranks).toStrictEqual([
      {
        rows: [[[5, 1, 1, 6, 3, 1]]],
        pass: [{ group: 0, zero: [7], partialBlock: { blockId: 6, fromToken: 8 } }],
      },
      { rows: [[[5, 1, 1]]], pass: [{ group: 0, zero: [6, 7] }] },
    ]);
  });

  test("after a prefix hit, the partial block is the last one of the rank's slice", () => {
    // One computed block of rank 1 is block 1 of the sequence; block 3 is wanted, and begins at
    // token 48.
    const plan = planOf({ local: { tpSize: 2, tpRank: 1, dcpSize: 2 } });
    const blocks = {
      localBlockIds: [[6]],
      remoteBlockIds: [[1, 3]],
      numTokens: 53,
      localComputedBlocks: [1],
    };
    expect(pairsOf(plan, blocks)).toStrictEqual({
      rows: [[[6, 3, 1]]],
      pass: [{ group: 0, zero: [], partialBlock: { blockId: 6, fromToken: 5 } }],
    });
  });

  test("with several DCP groups, a rank's slice is its position in its group", () => {
    // Rank 3 of four here is the second of its group, and reads the second of the remote's second
    // group.
    const plan = planOf({ local: { tpSize: 4, tpRank: 3, dcpSize: 2 }, remote: { tpSize: 4 } });
    expect(plan.sources.map(({ remoteRank }) => remoteRank)).toStrictEqual([3]);
    expect(
      pairsOf(plan, { localBlockIds: [[5]], remoteBlockIds: [[1]], numTokens: 20 }),
    ).toStrictEqual({
      rows: [[[5, 1, 1]]],
      pass: [{ group: 0, zero: [], partialBlock: { blockId: 5, fromToken: 4 } }],
    });
  });
});

describe("without a known prefix hit, both lists end at the same block", () => {
  const slice = planOf({ local: { tpSize: 2, dcpSize: 2 } });
  test.each<[string, EngineTransferPlan, RequestBlocks, number]>([
    [
      "no DCP here",
      planOf(),
      { localBlockIds: [[7, 8]], remoteBlockIds: [[1, 2, 3]], numTokens: 77 },
      3,
    ],
    [
      "DCP on both sides",
      slice,
      { localBlockIds: [[7, 8]], remoteBlockIds: [[1, 2, 3]], numTokens: 77 },
      1,
    ],
    [
      "DCP on both sides, tokens unknown",
      slice,
      { localBlockIds: [[7]], remoteBlockIds: [[1, 2, 3]] },
      2,
    ],
  ])("%s", (_what, plan, blocks, computed) => {
    const told = { ...blocks, localComputedBlocks: [computed] };
    expect(pairsOf(plan, blocks)).toStrictEqual(pairsOf(plan, told));
    const proven = (given: RequestBlocks) => {
      const requests = [{ blocks, plan: planRequest(plan, given) }];
      return provePlan(plan, { remotes: remotesOf(), numKvHeads: 1, requests }).proven;
    };
    expect([proven(told), proven({ ...blocks, localComputedBlocks: [0] })]).toEqual([true, false]);
  });
});

describe("refuses", () => {
  const refused = (attempt: () => unknown, code: KvErrorCode, message: RegExp) => {
    expect(attempt).toThrow(message);
    try {
      attempt();
    } catch (error) {
      expect(KvError.is(error) && error.code).toBe(code);
    }
  };

  test("a repeated local block, filled by one source or by two", () => {
    const twice = (ids: readonly number[]) => () =>
      pairsOf(planOf(), {
        localBlockIds: [ids],
        remoteBlockIds: [[1, 2]],
        numTokens: ids.length * 16,
      });
    refused(twice([5, 6, 5]), "KV_BLOCKS_OUT_OF_RANGE", /local block 5 is to be filled twice/);
    refused(twice([5, 5]), "KV_BLOCKS_OUT_OF_RANGE", /local block 5 is to be filled twice/);
  });

  test("a list with an ambiguous start", () => {
    const attempt = (blocks: RequestBlocks) => () => pairsOf(planOf(), blocks);
    const lists = { localBlockIds: [[5, 6]], remoteBlockIds: [[1]] };
    refused(
      attempt(lists),
      "KV_BLOCKS_MISMATCH",
      /2 local blocks \(DCP 1\) and 1 remote ones \(DCP 2\).*tokens: unknown/,
    );
    refused(
      attempt({ ...lists, numTokens: 16 }),
      "KV_BLOCKS_MISMATCH",
      /2 local blocks.*tokens: 16/,
    );
    expect(attempt({ ...lists, numTokens: 16 })).toThrow(
      expect.objectContaining({
        details: { group: 0, localBlocks: 2, remoteBlocks: 1, numTokens: 16 },
      }),
    );
    // The remote's list has only its own slice, so its length does not give the start.
    refused(
      attempt({ localBlockIds: [[5]], remoteBlockIds: [[1, 2]] }),
      "KV_BLOCKS_MISMATCH",
      /1 local blocks \(DCP 1\) and 2 remote ones \(DCP 2\).*tokens: unknown/,
    );
  });

  test("a block that no source covers", () => {
    const plan = planOf();
    const half = { ...plan, sources: plan.sources.slice(0, 1) };
    const attempt = () =>
      pairsOf(half, { localBlockIds: [[5, 6]], remoteBlockIds: [[1]], numTokens: 32 });
    refused(attempt, "KV_BLOCKS_MISMATCH", /group 0: no remote rank covers local block 6/);
  });
});

function refusal(act: () => unknown): { code: string; message: string; details: unknown } {
  try {
    act();
  } catch (error) {
    if (KvError.is(error))
      return { code: error.code, message: error.message, details: error.details };
  }
  return expect.fail("nothing was refused");
}

describe("applyDcpPrefixCaching", () => {
  /**
   * Blocks of a rank's slice: position p of the sequence is on rank p mod size, and p is its block
   * id here.
   */
  const slice = (rank: number, size: number, blocks: number) =>
    Array.from(
      { length: Math.max(0, Math.ceil((blocks - rank) / size)) },
      (_, index) => rank + index * size,
    );

  test("pairs blocks of equal positions for all DCP sizes, ranks and prefix hits", () => {
    let pairs = 0;
    for (const [localDcpSize, remoteDcpSize] of [
      [1, 1],
      [1, 2],
      [2, 1],
      [1, 4],
      [4, 1],
      [2, 4],
      [4, 2],
      [4, 4],
      [2, 8],
    ] as const) {
      const shared = Math.min(localDcpSize, remoteDcpSize);
      for (let localDcpRank = 0; localDcpRank < localDcpSize; localDcpRank++)
        for (
          let remoteDcpRank = localDcpRank % shared;
          remoteDcpRank < remoteDcpSize;
          remoteDcpRank += shared
        )
          for (const blocks of [0, 1, 5, 13])
            for (const computed of [0, 1, 2])
              for (const copy of localDcpSize >= remoteDcpSize ? [0, 1] : [0])
                for (const known of [true, false]) {
                  const localIds = slice(localDcpRank, localDcpSize, blocks).slice(computed);
                  const given = {
                    localDcpSize,
                    localDcpRank,
                    remoteDcpSize,
                    localNumComputedBlocks: computed,
                    remoteRank: remoteDcpRank + copy * remoteDcpSize,
                    // A pool gives whole blocks out: where the sequence's end is known they are not
                    // wanted.
                    localIds: known ? [...localIds, 900, 901] : localIds,
                    remoteIds: slice(remoteDcpRank, remoteDcpSize, blocks),
                  };
                  const both = localIds.filter((at) => at % remoteDcpSize === remoteDcpRank);
                  expect([
                    given,
                    applyDcpPrefixCaching({
                      ...given,
                      ...(known ? { numRemoteBlocks: blocks } : {}),
                    }),
                  ]).toEqual([given, { localIds: both, remoteIds: both }]);
                  pairs += both.length;
                }
    }
    expect(pairs).toBeGreaterThan(500);
  });

  test("ranks without a common position get the end of the remote's list, as in vLLM", () => {
    const apart = {
      localDcpSize: 4,
      localDcpRank: 0,
      remoteDcpSize: 2,
      remoteRank: 1,
      localNumComputedBlocks: 0,
    };
    expect(applyDcpPrefixCaching({ ...apart, localIds: [7, 8], remoteIds: [1, 2, 3] })).toEqual({
      localIds: [7],
      remoteIds: [3],
    });
    expect(applyDcpPrefixCaching({ ...apart, localIds: [7, 8], remoteIds: [] }).remoteIds).toEqual(
      [],
    );
    const equal = { ...apart, localDcpSize: 2, localNumComputedBlocks: 1 };
    expect(applyDcpPrefixCaching({ ...equal, localIds: [7, 8], remoteIds: [1, 2, 3] })).toEqual({
      localIds: [7, 8],
      remoteIds: [2, 3],
    });
  });

  const whole = {
    localDcpSize: 1,
    localDcpRank: 0,
    remoteDcpSize: 1,
    remoteRank: 0,
    localNumComputedBlocks: 1,
  };

  test("ignores local blocks after the sequence, and refuses missing remote blocks before its end", () => {
    expect(
      applyDcpPrefixCaching({
        ...whole,
        localIds: [7, 8, 9],
        remoteIds: [1, 2, 3],
        numRemoteBlocks: 3,
      }),
    ).toEqual({ localIds: [7, 8], remoteIds: [2, 3] });
    expect(
      applyDcpPrefixCaching({
        ...whole,
        localIds: [7, 8],
        remoteIds: [1, 2, 3],
        numRemoteBlocks: 1,
      }),
    ).toEqual({ localIds: [], remoteIds: [] });
    const short = { ...whole, localIds: [7, 8, 9], remoteIds: [1, 2] };
    expect(refusal(() => applyDcpPrefixCaching({ ...short, numRemoteBlocks: 4 }))).toEqual({
      code: "KV_BLOCKS_MISMATCH",
      message: "remote rank 0 covers 1 of the 3 blocks wanted from it",
      details: { remoteRank: 0, wanted: 3, covered: 1 },
    });
    // Of a sequence of unknown length what there is.
    expect(applyDcpPrefixCaching(short)).toEqual({ localIds: [7], remoteIds: [2] });
  });
});
