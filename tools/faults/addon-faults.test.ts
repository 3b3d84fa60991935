import { pullConnector } from "@kv/pull";
import { pushConnector } from "@kv/push";
import { seededRandom } from "@kv/transport-memory";
import { describe, expect, it } from "vitest";
import { fakeMissing } from "../../packages/nixl/test/fake-nixl.js";
import { type FaultLoad, type FaultRunReport, faultRunOn } from "../../packages/pull/test/fault-run.js";
import { fakeGround } from "./fake-ground.js";
import { REAL_TIMES } from "./real-time.js";

const requests = Number(process.env.KV_ADDON_REQUESTS ?? 400);
const seed = process.env.KV_SEED ?? "addon";

const LOAD = { requests, seed, clients: 24, times: REAL_TIMES, deathEvery: 120 };
const LOADS: Readonly<Record<"pull" | "push", FaultLoad>> = {
  pull: { ...LOAD, connector: pullConnector },
  push: { ...LOAD, connector: pushConnector, atOnce: 0.6, numBlocks: 192, layerwise: true },
};

export function expectCleanEnd(report: FaultRunReport, load: FaultLoad): void {
  console.info(JSON.stringify(report));
  expect(report.violations).toEqual([]);
  expect(report.left).toEqual({});
  const total = Object.values(report.outcomes).reduce((sum, count) => sum + count, 0);
  expect(total).toBe(load.requests);
  // A connector that refuses everything would pass the rest.
  expect(report.outcomes.ok ?? 0).toBeGreaterThan(load.requests * 0.3);
  expect(report.kills).toBeGreaterThan(0);
}

describe.skipIf(fakeMissing)(`faults over the addon and its stand-in for NIXL (${fakeMissing ?? "found"})`, () => {
  it.each([
    ["pull", "UCX"],
    ["push", "UCX"],
    ["pull", "LIBFABRIC"],
    ["push", "LIBFABRIC"],
  ] as const)(
    `%s, %s: ${requests} requests: right bytes or a typed error, nothing registered, held or under way in the end`,
    async (name, backend) => {
      const load = LOADS[name];
      const ground = await fakeGround({ backend, random: seededRandom(`${seed} ${name} ${backend}`) });
      expectCleanEnd(await faultRunOn(ground, load), load);
    },
    1_800_000,
  );
});
