import { PUSH_FAULT_RULES } from "@kv/testing/faults/fault-rules";
import { faultRun } from "@kv/testing/faults/fault-run";
import { describe, expect, it } from "vitest";
import { pushConnector } from "../src/index.js";

const requests = Number(process.env.KV_REQUESTS ?? 1000);
// The default seed is fixed. KV_SEED=random uses a new seed for each run, and prints it.
const asked = process.env.KV_SEED ?? "push";
const seed = asked === "random" ? `${Date.now()}` : asked;
// A consumer holds blocks while its prompt is computed, so more of them are in use than with pull.
const push = { connector: pushConnector, rules: PUSH_FAULT_RULES, atOnce: 0.6, numBlocks: 192 };

describe(`${requests} requests under faults`, () => {
  it(`end with the right bytes or a typed error, and leave nothing in use (KV_SEED=${seed})`, async () => {
    const report = await faultRun({ seed, requests, ...push });
    const replay = `replay: KV_SEED=${seed} KV_REQUESTS=${requests} npx vitest run packages/push/test/faults.test.ts`;
    console.info(JSON.stringify({ seed, ...report }));
    expect(report.violations, replay).toEqual([]);
    expect(report.left, replay).toEqual({});
    const total = Object.values(report.outcomes).reduce((sum, count) => sum + count, 0);
    expect(total, replay).toBe(requests);
    // Most must succeed: a connector that refuses everything would pass all other checks.
    expect(report.outcomes.ok ?? 0, replay).toBeGreaterThan(
      requests * (requests < 1000 ? 0.5 : 0.6),
    );
  }, 1_800_000);

  it("do the same with layer-wise push", async () => {
    const some = Math.ceil(requests / 4);
    const report = await faultRun({
      seed: `${seed} layers`,
      requests: some,
      ...push,
      layerwise: true,
    });
    console.info(JSON.stringify({ seed, ...report }));
    expect(report.violations).toEqual([]);
    expect(report.left).toEqual({});
    expect(report.outcomes.ok ?? 0).toBeGreaterThan(some * 0.6);
  }, 900_000);

  it("repeat exactly with the same seed", async () => {
    const first = await faultRun({ seed: "again", requests: 300, ...push });
    expect(await faultRun({ seed: "again", requests: 300, ...push })).toEqual(first);
  }, 900_000);
});
