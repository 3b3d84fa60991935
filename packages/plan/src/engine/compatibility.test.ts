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

test("blocks whose heads are spread over memory are not cut by head or by token", () => {
  const layout = "LHBNC";
  expect(refusal(sampleRank({ layout, tpSize: 2 }), sampleRank({ layout }))).toMatch(
    /split by head.*local 2 heads, LHBNC, remote 4 heads, LHBNC/,
  );
  expect(refusal(blocks(32, { layout }), blocks(16, { layout }))).toMatch(
    /known order of tokens: local 32 tokens, LHBNC on FLASH_ATTN, remote 16 tokens/,
  );
  expect(refusal(blocks(16, { layout }), blocks(16, { layout }))).toBeUndefined();
});

test("a backend with an order of tokens of its own has whole blocks only", () => {
  const own = { attentionBackend: "CPU_ATTN" };
  expect(refusal(blocks(32, own), blocks(16, own))).toMatch(/LBHNC on CPU_ATTN, remote 16 tokens/);
  expect(refusal(blocks(16, own), blocks(16, own))).toBeUndefined();
});

test("one head is in order in any layout: blocks of other sizes are cut, and proven", () => {
  for (const layout of ["LHBNC", "BHLNC"] as const) {
    const [local, remote] = [blocks(32, { layout, tpSize: 4 }), blocks(16, { layout, tpSize: 4 })];
    expect(refusal(local, remote)).toBeUndefined();
    const plan = buildEngineTransferPlan(samplePair(local, remote));
    expect(plan.form).toBe("copy");
    expect(provePlan(plan, { remotes: [remote], numKvHeads: 4 })).not.toHaveProperty("fault");
  }
});

test("block sizes that do not divide need heads that do: they are cut by head", () => {
  const three = { tpSize: 3 };
  expect(refusal(blocks(16, three), blocks(32, three))).toMatch(
    /need KV heads that divide over the ranks: local 4 KV heads, remote TP 3/,
  );
  expect(refusal(blocks(32, three), blocks(16, three))).toBeUndefined();
  expect(refusal(blocks(16, { tpSize: 2 }), blocks(32, {}))).toBeUndefined();
});
