import { faultRun } from "@kv/testing/faults/fault-run";
import { describe, expect, it } from "vitest";

const requests = Number(process.env.KV_REQUESTS ?? 1000);
// The default seed is fixed. KV_SEED=random uses a new seed for each run, and prints it.
const asked = process.env.KV_SEED ?? "pull";
const seed = asked === "random" ? `${Date.now()}` : asked;

describe(`${requests} requests under faults`, () => {
  it(`end with the correct KV or a typed error, and nothing stays held (KV_SEED=${seed})`, async () => {
    const report = await faultRun({ seed, requests });
    const replay = `replay: KV_SEED=${seed} KV_REQUESTS=${requests} npx vitest run packages/pull/test/faults.test.ts`;
    console.info(JSON.stringify({ seed, ...report }));
    expect(report.violations, replay).toEqual([]);
    expect(report.left, replay).toEqual({});
    const total = Object.values(report.outcomes).reduce((sum, count) => sum + count, 0);
    expect(total, replay).toBe(requests);
    // Most requests must succeed: a connector that refuses every request would pass the other
    // checks.
    expect(report.outcomes.ok ?? 0, replay).toBeGreaterThan(requests * 0.6);
  }, 1_800_000);

  it(`end the same way with producers that speak only vLLM's protocol (KV_SEED=${seed})`, async () => {
    const report = await faultRun({
      seed,
      requests: Math.ceil(requests / 4),
      plainProducers: true,
    });
    const replay = `replay: KV_SEED=${seed} KV_REQUESTS=${requests} npx vitest run packages/pull/test/faults.test.ts`;
    console.info(JSON.stringify({ seed, ...report }));
    expect(report.violations, replay).toEqual([]);
    expect(report.left, replay).toEqual({});
    expect(report.outcomes.ok ?? 0, replay).toBeGreaterThan(requests * 0.15);
  }, 1_800_000);

  it("give equal reports for equal seeds", async () => {
    const first = await faultRun({ seed: "again", requests: 300 });
    expect(await faultRun({ seed: "again", requests: 300 })).toEqual(first);
  }, 900_000);
});
