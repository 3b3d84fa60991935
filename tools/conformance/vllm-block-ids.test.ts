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
    if (KvError.is(error))
      return { code: error.code, message: error.message, details: error.details };
  }
  return expect.fail("nothing was refused");
}

describe("logicalToKernelBlockIds", () => {
  test("expands each logical block into consecutive kernel blocks, except in mamba groups", () => {
    const ids = [[3, 0], [2], []];
    const expanded = logicalToKernelBlockIds(["full", "mamba", "mla"], ids, 3);
    expect(expanded).toEqual([[9, 10, 11, 0, 1, 2], [2], []]);
    // Undivided lists are not copied, because lists of a long prompt are long.
    expect(logicalToKernelBlockIds(["full", "mamba", "mla"], ids, 1)[0]).toBe(ids[0]);
  });

  test("refuses another number of groups and names both numbers", () => {
    expect(refusal(() => logicalToKernelBlockIds(["full"], [[1], [2]], 1))).toEqual({
      code: "KV_BLOCKS_MISMATCH",
      message: "block ids of 2 KV cache groups given, the engine has 1",
      details: { given: 2, groups: 1 },
    });
  });
});

describe("mapBlockIdsForBlockSizeRatio", () => {
  test("splits local blocks into parts of the remote size, at most as many as the remote has", () => {
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

  test("returns no local lists when there is no local block", () => {
    for (const none of [[], [[], []]]) {
      expect(
        mapBlockIdsForBlockSizeRatio(["full", "full"], none, [[1], [2]], 2).localBlockIds,
      ).toEqual([]);
    }
    expect(
      mapBlockIdsForBlockSizeRatio(["full", "full"], [[], [1]], [[1], [2]], 2).localBlockIds,
    ).toEqual([[], [2]]);
  });

  test("refuses another number of groups on either side", () => {
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

describe("applyPrefixCaching", () => {
  const apply = (options: Partial<PrefixCachingOptions>) =>
    applyPrefixCaching({
      groups: ["full"],
      decodeBlockIds: [[]],
      prefillBlockIds: [[]],
      decodePhysicalPerLogical: 1,
      prefillPhysicalPerLogical: 1,
      ...options,
    });

  test("keeps the end of prefill's list; a group without decode blocks is unchanged", () => {
    const groups = ["full", "mla", "swa"];
    const decodeBlockIds = [[7, 8], [], [9]];
    expect(apply({ groups, decodeBlockIds, prefillBlockIds: [[1, 2, 3], [4, 5], [6]] })).toEqual({
      decodeBlockIds,
      prefillBlockIds: [[2, 3], [4, 5], [6]],
    });
  });

  test("refuses more decode blocks than prefill blocks and names both numbers", () => {
    const act = () => apply({ decodeBlockIds: [[1, 2]], prefillBlockIds: [[5]] });
    expect(refusal(act)).toEqual({
      code: "KV_BLOCKS_MISMATCH",
      message:
        "group 0 (full): decode wants 2 blocks and prefill holds 1; they may differ by 0 at most",
      details: { group: 0, kind: "full", wanted: 2, held: 1, allowance: 0 },
    });
  });

  const hybrid = { groups: ["full", "mamba"], prefillPhysicalPerLogical: 2 } as const;
  /** `count` ascending numbers, starting with `from`. */
  const run = (count: number, from = 0) =>
    Array.from({ length: count }, (_, index) => from + index);

  test("mamba group: decode may have one block more than prefill, not two", () => {
    const states = (wanted: number, held: number) =>
      apply({
        ...hybrid,
        decodeBlockIds: [[], run(wanted, 10)],
        prefillBlockIds: [[], run(held, 20)],
      });
    expect(states(2, 1)).toEqual({ decodeBlockIds: [[], [10]], prefillBlockIds: [[], [20]] });
    expect(states(1, 3)).toEqual({ decodeBlockIds: [[], [10]], prefillBlockIds: [[], [22]] });
    expect(states(1, 1)).toEqual({ decodeBlockIds: [[], [10]], prefillBlockIds: [[], [20]] });
    expect(refusal(() => states(3, 1)).message).toMatch(
      /wants 3 blocks and prefill holds 1; .* by 1 at most/,
    );
  });

  test.each([
    // With different numbers of kernel blocks per logical block the lists start together. Either
    // may be longer by the rounding of both.
    [3, 5, 4, 4, "begin"],
    [3, 4, 5, 4, "begin"],
    [3, 9, 4, 4, "begin"],
    [3, 4, 9, 4, "begin"],
    [3, 10, 4, 4, "refused"],
    [3, 4, 10, 4, "refused"],
    // With equal numbers decode's list is the end of prefill's list, or is itself longer by the
    // rounding.
    [2, 4, 20, 4, "end"],
    [2, 4, 4, 4, "begin"],
    [2, 8, 4, 4, "begin"],
    [2, 9, 4, 4, "refused"],
  ])(
    "attention group of a hybrid, %i kernel blocks per decode logical block, %i wanted, %i held: %i from the %s",
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

  test("refuses another number of groups on either side", () => {
    expect(refusal(() => apply({ decodeBlockIds: [[], []] })).code).toBe("KV_BLOCKS_MISMATCH");
    expect(refusal(() => apply({ prefillBlockIds: [] })).code).toBe("KV_BLOCKS_MISMATCH");
  });
});
