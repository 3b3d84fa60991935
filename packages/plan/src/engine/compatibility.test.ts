import { describe, expect, test } from "vitest";
import type { RankGeometry } from "../geometry/rank-geometry.js";
import { provePlan } from "../prove/prove-plan.js";
import { refusal, why } from "../refused.test-support.js";
import { samplePlan, sampleRank, withRegions } from "../sample-pair.test-support.js";
import { checkCompatibility } from "./compatibility.js";
import { buildEngineTransferPlan } from "./engine-plan.js";

const checked = (local: RankGeometry, remote: RankGeometry) => () =>
  checkCompatibility({ local, remote, numKvHeads: 4, groups: ["full"] });
const blocks = (kernelBlockSize: number, change: Partial<RankGeometry>) =>
  sampleRank({ kernelBlockSize, ...change });

test("refuses to cut blocks by head or by token in a layout that spreads heads over memory", () => {
  const layout = "LHBNC";
  expect(why(checked(sampleRank({ layout, tpSize: 2 }), sampleRank({ layout })))).toContain(
    "split by head, and the layout does not keep heads together: local 2 heads, LHBNC, remote 4 heads, LHBNC",
  );
  expect(why(checked(blocks(32, { layout }), blocks(16, { layout })))).toContain(
    "known order of tokens: local 32 tokens, LHBNC on FLASH_ATTN, remote 16 tokens",
  );
  expect(why(checked(blocks(16, { layout }), blocks(16, { layout })))).toBeUndefined();
});

test("refuses to cut blocks of a backend with its own token order; moves whole blocks", () => {
  const own = { attentionBackend: "CPU_ATTN" };
  expect(why(checked(blocks(32, own), blocks(16, own)))).toContain(
    "LBHNC on CPU_ATTN, remote 16 tokens",
  );
  expect(why(checked(blocks(16, own), blocks(16, own)))).toBeUndefined();
});

test("cuts blocks of one head in any layout, and the plan is proven", () => {
  for (const layout of ["LHBNC", "BHLNC"] as const) {
    const [local, remote] = [blocks(32, { layout, tpSize: 4 }), blocks(16, { layout, tpSize: 4 })];
    expect(why(checked(local, remote))).toBeUndefined();
    const plan = samplePlan(local, remote);
    expect(plan.form).toBe("copy");
    expect(provePlan(plan, { remotes: [remote], numKvHeads: 4 })).not.toHaveProperty("fault");
  }
});

test("larger remote blocks need KV heads that divide over the ranks", () => {
  const three = { tpSize: 3 };
  expect(why(checked(blocks(16, three), blocks(32, three)))).toContain(
    "need KV heads that divide over the ranks: local 4 KV heads, remote TP 3",
  );
  expect(why(checked(blocks(32, three), blocks(16, three)))).toBeUndefined();
  expect(why(checked(blocks(16, { tpSize: 2 }), blocks(32, {})))).toBeUndefined();
});

describe("blocks that are not heads × tokens × cells", () => {
  const built = (local: RankGeometry, remotes: readonly RankGeometry[], cacheDtype?: string) =>
    buildEngineTransferPlan({ local, remotes, numKvHeads: 4, groups: ["full"], cacheDtype });
  const ranks = (tpSize: number, change: Partial<RankGeometry> = {}) =>
    Array.from({ length: tpSize }, (_, tpRank) => sampleRank({ tpSize, tpRank, ...change }));
  const NVFP4 = 'blocks of cache dtype "nvfp4" do not keep heads and tokens apart';

  test.each([
    [1, 2],
    [2, 1],
    [4, 1],
  ])(
    "vllm#52516: nvfp4 at TP %i → %i is refused by name, where heads would be split",
    (prefill, decode) => {
      const heads = (tpSize: number) => `${4 / tpSize} heads, TP ${tpSize}`;
      for (const local of ranks(decode)) {
        const remotes = ranks(prefill).slice(0, Math.max(1, prefill / decode));
        expect(why(() => built(local, remotes, "nvfp4"))).toBe(
          `region "layer.0": blocks must be split by head, and ${NVFP4}: local ${heads(decode)}, remote ${heads(prefill)}`,
        );
        expect(why(() => built(local, remotes, "fp8_per_token_head"))).toBeUndefined();
        expect(why(() => built(local, remotes, "nvfp9"))).toContain(
          'cache dtype "nvfp9" is not known',
        );
      }
    },
  );

  test("vllm#52516: equal ranks copy nvfp4 blocks whole, and no token of the last block is zeroed", () => {
    const plan = built(sampleRank(), [sampleRank()], "nvfp4");
    expect([plan.form, plan.blockOrder, plan.uncovered]).toEqual(["copy", "opaque", "masked"]);
    expect(plan.segments.map(({ lengthBytes }) => lengthBytes)).toEqual([512, 512]);
    expect(provePlan(plan, { remotes: [sampleRank()], numKvHeads: 4 })).not.toHaveProperty("fault");
    expect(built(sampleRank(), [sampleRank()]).uncovered).toBe("zeroed");
  });

  test("replicas of one head are copied whole at any TP size", () => {
    const plan = built(sampleRank({ tpSize: 8 }), [sampleRank({ tpSize: 4 })], "nvfp4");
    expect(plan.form).toBe("copy");
  });

  test("other block sizes and other orders of heads and tokens are refused", () => {
    const small = sampleRank();
    expect(why(() => built(sampleRank({ kernelBlockSize: 32 }), [small], "nvfp4"))).toBe(
      `region "layer.0": kernel blocks of different sizes must be cut by token, and ${NVFP4}: local 32 tokens, remote 16 tokens`,
    );
    expect(why(() => built(small, [sampleRank({ layout: "LBNHC" })], "nvfp4"))).toBe(
      `region "layer.0": heads and tokens must be put in another order, and ${NVFP4}: local LBHNC, remote LBNHC`,
    );
    // The layers of a block side by side do not change the order within one.
    expect(why(() => built(small, [sampleRank({ layout: "BLHNC" })], "nvfp4"))).toBeUndefined();
  });

  test("latents with their scales are copied whole at any TP size, and not cut by token", () => {
    const mla = (change: Partial<RankGeometry> = {}) => {
      const { kernelBlockSize = 16 } = change;
      return sampleRank({ ...change, blockLengthBytes: 584 * kernelBlockSize });
    };
    const latents = (local: RankGeometry, remote: RankGeometry, cacheDtype: string) =>
      buildEngineTransferPlan({
        local,
        remotes: [remote],
        numKvHeads: 1,
        groups: ["mla"],
        cacheDtype,
      });
    const plan = latents(mla({ tpSize: 2 }), mla(), "fp8_ds_mla");
    expect([plan.form, plan.uncovered]).toEqual(["copy", "masked"]);
    expect(why(() => latents(mla({ kernelBlockSize: 32 }), mla(), "fp8_ds_mla"))).toContain(
      "must be cut by token",
    );
    expect(latents(mla({ kernelBlockSize: 32 }), mla(), "auto").form).toBe("copy");
    // Every rank has the same latents: their layouts do not matter.
    expect(latents(mla({ layout: "LBNHC" }), mla(), "fp8_ds_mla").form).toBe("copy");
  });

  test("backends that hold the K of all heads before the V of all heads", () => {
    const attentionBackend = "ROCM_ATTN";
    expect(
      why(() => built(sampleRank({ attentionBackend }), ranks(2, { attentionBackend }))),
    ).toContain("split by head, and blocks of ROCM_ATTN hold the K of all heads before the V");
    expect(built(sampleRank({ attentionBackend }), [sampleRank({ attentionBackend })]).form).toBe(
      "copy",
    );
  });

  test("a hybrid's pages that do not divide into heads and tokens are padded to the size of a state", () => {
    const hybrid = (tpSize: number, tpRank = 0) => {
      const stateSpace = { convBytes: 64 / tpSize, recurrentBytes: 64 / tpSize };
      const rank = sampleRank({ tpSize, tpRank, stateSpace, blockLengthBytes: 600 / tpSize });
      return withRegions(rank, () => ({ groupId: -1 }));
    };
    const plan = (local: RankGeometry, remote: RankGeometry) =>
      buildEngineTransferPlan({
        local,
        remotes: [remote],
        numKvHeads: 4,
        groups: ["full", "mamba"],
      });
    expect(why(() => plan(hybrid(2, 1), hybrid(1)))).toContain(
      "split by head, and a block of 300 bytes is not 2 heads × 16 tokens: it is padded or packed",
    );
    expect(plan(hybrid(1), hybrid(1)).uncovered).toBe("masked");
  });

  test("pages that are padded: 4,608 bytes of a block of 9,216 are not the second of two heads (vllm#52516)", () => {
    const page = (tpSize: number, tpRank = 0, cellBytes?: number) => {
      const rank = sampleRank({ tpSize, tpRank, blockLengthBytes: 9216 / tpSize });
      return withRegions(rank, () => ({ cellBytes }));
    };
    // 4 heads × 16 tokens of 128 bytes, and 1,024 bytes of padding.
    const refused =
      "a block of 4608 bytes is not 2 heads × 16 tokens of 128 bytes: it is padded or packed";
    expect(why(() => built(page(2, 1, 128), [page(1)]))).toMatch(refused);
    expect(why(() => built(page(2, 1, 144), [page(1)]))).toBeUndefined();
    expect(built(page(1, 0, 128), [page(1)]).uncovered).toBe("masked");
  });
});

test("vllm#54926: numbers of regions that differ name the regions of one side, such as a draft model's", () => {
  const rank = sampleRank();
  const [region] = rank.regions;
  if (region === undefined) return expect.fail("no region");
  const named = (...names: readonly string[]): RankGeometry => ({
    ...rank,
    regions: names.map((name, index) => ({ ...region, name, baseAddress: 4096 + index * 2 ** 20 })),
  });
  const differs = (local: RankGeometry, remote: RankGeometry) => {
    const { code, message, hint } = refusal(checked(local, remote));
    expect(code).toBe("KV_PLAN_INCOMPATIBLE");
    return [message, hint] as const;
  };
  const [message, hint] = differs(named("layer.0"), named("layer.0", "draft.0", "draft.1"));
  expect(message).toBe(
    'numbers of regions differ; only the remote rank has "draft.0", "draft.1": local 1, remote 3',
  );
  expect(hint).toContain(
    "draft model on one side only is the usual cause: give both engines the same --speculative-config",
  );
  expect(differs(named("layer.0", "layer.1", "mtp"), named("layer.0", "layer.2"))[0]).toBe(
    'numbers of regions differ; only the local rank has "layer.1", "mtp"; only the remote rank has "layer.2": local 3, remote 2',
  );
  const many = Array.from({ length: 12 }, (_, index) => `draft.${index}`);
  expect(differs(named("layer.0"), named("layer.0", ...many))[0]).toMatch(
    /"draft.7" and 4 more: local 1, remote 13$/,
  );
});

test("H1: a state that does not fit into its region is refused from both sides, whichever rank has it", () => {
  const rank = (recurrentBytes: number, groupId: number) =>
    withRegions(sampleRank({ stateSpace: { convBytes: 0, recurrentBytes } }), (_, at) => ({
      groupId: at * groupId,
    }));
  const unfit = (local: RankGeometry, remote: RankGeometry) =>
    why(
      () => checkCompatibility({ local, remote, numKvHeads: 4, groups: ["full", "mamba"] }),
      "KV_PLAN_INVALID",
    );
  const [fits, large] = [rank(512, 1), rank(513, 1)];
  expect(unfit(fits, fits)).toBeUndefined();
  expect(unfit(large, fits)).toMatch(
    /^the local rank, region "layer.1": a state of 0 \+ 513 bytes/,
  );
  expect(unfit(fits, large)).toMatch(/^remote rank 0, region "layer.1": a state of 0 \+ 513 bytes/);
  // Groups that share all regions have their states in each.
  expect(unfit(rank(513, 0), rank(513, 0))).toContain('region "layer.0": a state');
});

test("S4.10: an unknown kind of group is refused with its index", () => {
  const rank = sampleRank();
  const groups = ["full", "ring"];
  expect(() => checkCompatibility({ local: rank, remote: rank, numKvHeads: 4, groups })).toThrow(
    'group 1: kind "ring" is none of full, mla, swa',
  );
});
