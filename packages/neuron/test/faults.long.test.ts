// A long suite: fault runs with staging; npm test has those without.
import type { Staging } from "@kv/interface";
import { pullConnector } from "@kv/pull";
import { pushConnector } from "@kv/push";
import { PUSH_FAULT_RULES } from "@kv/testing/faults/fault-rules";
import { type FaultRunOptions, faultRun } from "@kv/testing/faults/fault-run";
import type { SimDevice, SimDeviceAround } from "@kv/testing/simulator/sim-options";
import type { SeededRandom } from "@kv/transport-memory";
import { describe, expect, it } from "vitest";
import { simNeuron } from "./sim-neuron.js";

// In fewer, no copy of staging fails.
const requests = Math.max(1000, Number(process.env.KV_REQUESTS ?? 1000));
const seed = process.env.KV_SEED ?? "neuron";

/** Smaller than the blocks of all concurrent requests, so that requests wait for the pool. */
const POOL_BLOCKS = 25;

/**
 * On each side one engine stages and the other registers its memory directly, so that all four
 * pairs occur.
 */
function halfNeuron(around: SimDeviceAround, random: SeededRandom): SimDevice | undefined {
  if (around.hostName === "p0" || around.hostName === "d0") return undefined;
  return simNeuron(around, { poolBlocks: POOL_BLOCKS, next: random.next, failures: 0.002 });
}

const PULL: Partial<FaultRunOptions> = { connector: pullConnector };
const PUSH: Partial<FaultRunOptions> = {
  connector: pushConnector,
  rules: PUSH_FAULT_RULES,
  atOnce: 0.6,
  numBlocks: 192,
};

// Break each rule of staging on purpose: the run must detect it, otherwise it proves nothing.
const SABOTAGE: Record<string, (staging: Staging) => Staging> = {
  "a save that is reported before it is done": (staging) => ({
    ...staging,
    async save(requestId, blocks) {
      staging.save(requestId, blocks).catch(() => {});
    },
  }),
  "a load that is reported before it is done": (staging) => ({
    ...staging,
    async load(requestId, blocks) {
      staging.load(requestId, blocks).catch(() => {});
    },
  }),
  "a load from the pool blocks in reverse order": (staging) => ({
    ...staging,
    load: (requestId, { device, wire }) =>
      staging.load(requestId, { device, wire: wire.map((ids) => [...ids].reverse()) }),
  }),
};

describe("the fault run detects", () => {
  it.each(Object.keys(SABOTAGE))(
    "%s",
    async (name) => {
      const wrapStaging = SABOTAGE[name] ?? ((staging: Staging) => staging);
      const report = await faultRun({
        seed: "bite",
        requests: 60,
        ...PULL,
        device: (around, random) =>
          simNeuron(around, { poolBlocks: POOL_BLOCKS, next: random.next, wrapStaging }),
      });
      expect(report.violations.join("\n")).toMatch(/wrong bytes|written to while nobody had it/);
    },
    600_000,
  );
});

describe(`${requests} requests under faults, half of the engines with staging`, () => {
  it.each([
    ["pull", PULL],
    ["push", PUSH],
  ])(
    "%s: each ends with the right bytes or a typed error; no block, pool block, lease or timer is left",
    async (_, options) => {
      const report = await faultRun({ seed, requests, device: halfNeuron, ...options });
      const replay = `replay: KV_SEED=${seed} KV_REQUESTS=${requests} npx vitest run packages/neuron/test/faults.long.test.ts`;
      console.info(JSON.stringify({ seed, ...report }));
      expect(report.violations, replay).toEqual([]);
      expect(report.left, replay).toEqual({});
      const total = Object.values(report.outcomes).reduce((sum, count) => sum + count, 0);
      expect(total, replay).toBe(requests);
      expect(report.outcomes.ok ?? 0, replay).toBeGreaterThan(requests * 0.6);
      // Some copies failed as well.
      expect(report.outcomes.KV_STAGING_FAILED ?? 0, replay).toBeGreaterThan(0);
    },
    1_800_000,
  );
});
