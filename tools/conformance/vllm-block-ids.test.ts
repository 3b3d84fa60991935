import { KvError } from "@kv/interface";
import { describe, expect, test } from "vitest";
import {
  applyPrefixCaching,
  logicalToKernelBlockIds,
  mapBlockIdsForBlockSizeRatio,
  type PrefixCachingOptions,
} from "./vllm-block-ids.js";

function refusal(act: () => unknown): { code: string; message: string; details: unknown } {
  try {
    act();
  } catch (error) {
    if (KvError.is(error)) return { code: error.code, message: error.message, details: error.details };
  }
  return expect.fail("nothing was refused");
}

describe("logical to kernel blocks", () => {
  test("each is as many as it holds, side by side; a state is one", () => {
    const ids = [[3, 0], [2], []];
    const expanded = logicalToKernelBlockIds(["full", "mamba", "mla"], ids, 3);
    expect(expanded).toEqual([[9, 10, 11, 0, 1, 2], [2], []]);
    // What is not divided is not copied: lists of a long prompt are long.
    expect(logicalToKernelBlockIds(["full", "mamba", "mla"], ids, 1)[0]).toBe(ids[0]);
  });

  test("lists for another number of groups are refused, with both", () => {
    expect(refusal(() => logicalToKernelBlockIds(["full"], [[1], [2]], 1))).toEqual({
      code: "KV_BLOCKS_MISMATCH",
      message: "block ids of 2 KV cache groups given, the engine has 1",
      details: { given: 2, groups: 1 },
    });
  });
});

describe("blocks of another size", () => {
  test("ours in parts of theirs, as many as they have", () => {
    const mapped = mapBlockIdsForBlockSizeRatio(
      ["full", "mamba"],
      [
        [3, 5],
        [7, 8],
      ],
      [[1, 2, 3], [4]],
      2,
    );
    expect(mapped).toEqual({
      localBlockIds: [
        [6, 7, 10],
        [7, 8],
      ],
      remoteBlockIds: [[1, 2, 3], [4]],
    });
  });

  test("no block of ours is no list, however it is said", () => {
    for (const none of [[], [[], []]]) {
      expect(mapBlockIdsForBlockSizeRatio(["full", "full"], none, [[1], [2]], 2).localBlockIds).toEqual([]);
    }
    expect(mapBlockIdsForBlockSizeRatio(["full", "full"], [[], [1]], [[1], [2]], 2).localBlockIds).toEqual([
      [],
      [2],
    ]);
  });

  test("lists for another number of groups are refused on either side", () => {
    for (const [local, remote] of [
      [[[1]], [[1]]],
      [[[1]], [[1], [2]]],
      [[[1], [2]], [[1]]],
      [[], [[1]]],
    ] as const) {
      const act = () => mapBlockIdsForBlockSizeRatio(["full", "full"], local, remote, 2);
      expect(refusal(act).code).toBe("KV_BLOCKS_MISMATCH");
    }
  });
});

describe("what a prefix hit leaves", () => {
  const apply = (options: Partial<PrefixCachingOptions>) =>
    applyPrefixCaching({
      groups: ["full"],
      decodeBlockIds: [[]],
      prefillBlockIds: [[]],
      decodePhysicalPerLogical: 1,
      prefillPhysicalPerLogical: 1,
      ...options,
    });

  test("decode's list is the end of prefill's; a group that wants nothing is left as it is", () => {
    const groups = ["full", "mla", "swa"];
    const decodeBlockIds = [[7, 8], [], [9]];
    expect(apply({ groups, decodeBlockIds, prefillBlockIds: [[1, 2, 3], [4, 5], [6]] })).toEqual({
      decodeBlockIds,
      prefillBlockIds: [[2, 3], [4, 5], [6]],
    });
  });

  test("decode may not want more than there is, with both numbers", () => {
    const act = () => apply({ decodeBlockIds: [[1, 2]], prefillBlockIds: [[5]] });
    expect(refusal(act)).toEqual({
      code: "KV_BLOCKS_MISMATCH",
      message: "group 0 (full): decode wants 2 blocks and prefill holds 1; they may differ by 0 at most",
      details: { group: 0, kind: "full", wanted: 2, held: 1, allowance: 0 },
    });
  });

  const hybrid = { groups: ["full", "mamba"], prefillPhysicalPerLogical: 2 } as const;
  /** Numbers in ascending order, so many. */
  const run = (count: number, from = 0) => Array.from({ length: count }, (_, index) => from + index);

  test("of a hybrid's states decode may have one more than there are, and no two", () => {
    const states = (wanted: number, held: number) =>
      apply({ ...hybrid, decodeBlockIds: [[], run(wanted, 10)], prefillBlockIds: [[], run(held, 20)] });
    expect(states(2, 1)).toEqual({ decodeBlockIds: [[], [10]], prefillBlockIds: [[], [20]] });
    expect(states(1, 3)).toEqual({ decodeBlockIds: [[], [10]], prefillBlockIds: [[], [22]] });
    expect(states(1, 1)).toEqual({ decodeBlockIds: [[], [10]], prefillBlockIds: [[], [20]] });
    expect(refusal(() => states(3, 1)).message).toMatch(
      /wants 3 blocks and prefill holds 1; .* by 1 at most/,
    );
  });

  test.each([
    // Of unlike kernel blocks in a logical one, lists begin together; either may be longer by the rounding of both.
    [3, 5, 4, 4, "begin"],
    [3, 4, 5, 4, "begin"],
    [3, 9, 4, 4, "begin"],
    [3, 4, 9, 4, "begin"],
    [3, 10, 4, 4, "refused"],
    [3, 4, 10, 4, "refused"],
    // Of equal ones decode's is the end of prefill's, however long; and still it may be longer itself by the rounding.
    [2, 4, 20, 4, "end"],
    [2, 4, 4, 4, "begin"],
    [2, 8, 4, 4, "begin"],
    [2, 9, 4, 4, "refused"],
  ])(
    "of a hybrid's attention, %i kernel blocks in decode's logical one, %i wanted, %i held: %i, from the %s",
    (decodePhysicalPerLogical, wanted, held, common, from) => {
      const act = () =>
        apply({
          ...hybrid,
          decodePhysicalPerLogical,
          decodeBlockIds: [run(wanted, 100), []],
          prefillBlockIds: [run(held, 200), []],
        });
      if (from === "refused") {
        const allowance = decodePhysicalPerLogical + 2;
        expect(refusal(act).details).toMatchObject({ wanted, held, allowance });
        return;
      }
      expect(act()).toEqual({
        decodeBlockIds: [run(common, 100), []],
        prefillBlockIds: [from === "end" ? run(held, 200).slice(-common) : run(common, 200), []],
      });
    },
  );

  test("lists for another number of groups are refused on either side", () => {
    expect(refusal(() => apply({ decodeBlockIds: [[], []] })).code).toBe("KV_BLOCKS_MISMATCH");
    expect(refusal(() => apply({ prefillBlockIds: [] })).code).toBe("KV_BLOCKS_MISMATCH");
  });
});
