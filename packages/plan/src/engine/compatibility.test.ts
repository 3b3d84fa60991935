import { KvError } from "@kv/interface";
import { expect, test } from "vitest";
import type { RankGeometry } from "../geometry/rank-geometry.js";
import { provePlan } from "../prove/prove-plan.js";
import { samplePair, sampleRank } from "../sample-pair.test-support.js";
import { checkCompatibility } from "./compatibility.js";
import { buildEngineTransferPlan } from "./engine-plan.js";

function refusal(local: RankGeometry, remote: RankGeometry, numKvHeads = 4): string | undefined {
  try {
    checkCompatibility({ local, remote, numKvHeads, groups: ["full"] });
    return undefined;
  } catch (error) {
    if (KvError.is(error, "KV_PLAN_UNSUPPORTED")) return error.message;
    throw error;
  }
}
const blocks = (kernelBlockSize: number, change: Partial<RankGeometry>) =>
  sampleRank({ kernelBlockSize, ...change });

test("refuses to cut blocks by head or by token in a layout that spreads heads over memory", () => {
  const layout = "LHBNC";
  expect(refusal(sampleRank({ layout, tpSize: 2 }), sampleRank({ layout }))).toMatch(
    /split by head.*local 2 heads, LHBNC, remote 4 heads, LHBNC/,
  );
  expect(refusal(blocks(32, { layout }), blocks(16, { layout }))).toMatch(
    /known order of tokens: local 32 tokens, LHBNC on FLASH_ATTN, remote 16 tokens/,
  );
  expect(refusal(blocks(16, { layout }), blocks(16, { layout }))).toBeUndefined();
});

test("refuses to cut blocks of a backend with its own token order; moves whole blocks", () => {
  const own = { attentionBackend: "CPU_ATTN" };
  expect(refusal(blocks(32, own), blocks(16, own))).toMatch(/LBHNC on CPU_ATTN, remote 16 tokens/);
  expect(refusal(blocks(16, own), blocks(16, own))).toBeUndefined();
});

test("cuts blocks of one head in any layout, and the plan is proven", () => {
  for (const layout of ["LHBNC", "BHLNC"] as const) {
    const [local, remote] = [blocks(32, { layout, tpSize: 4 }), blocks(16, { layout, tpSize: 4 })];
    expect(refusal(local, remote)).toBeUndefined();
    const plan = buildEngineTransferPlan(samplePair(local, remote));
    expect(plan.form).toBe("copy");
    expect(provePlan(plan, { remotes: [remote], numKvHeads: 4 })).not.toHaveProperty("fault");
  }
});

test("larger remote blocks need KV heads that divide over the ranks", () => {
  const three = { tpSize: 3 };
  expect(refusal(blocks(16, three), blocks(32, three))).toMatch(
    /need KV heads that divide over the ranks: local 4 KV heads, remote TP 3/,
  );
  expect(refusal(blocks(32, three), blocks(16, three))).toBeUndefined();
  expect(refusal(blocks(16, { tpSize: 2 }), blocks(32, {}))).toBeUndefined();
});
