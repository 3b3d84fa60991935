// A long suite: fault runs over the addon; npm test has those over the memory transport.
import { pullConnector } from "@kv/pull";
import { pushConnector } from "@kv/push";
import { type FaultLoad, faultRunOn } from "@kv/testing/faults/fault-run";
import { restartRunOn } from "@kv/testing/faults/restart-run";
import { fakeMissing } from "@kv/testing/nixl/fake-nixl";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { seededRandom } from "@kv/transport-memory";
import { describe, expect, it } from "vitest";
import { fakeNixlFixture } from "./fake-nixl-fixture.js";
import { multiProcessFixture } from "./multi-process-fixture.js";

const requests = Number(process.env.KV_ADDON_REQUESTS ?? 200);
/** `npm run test:long -- --only restarts` has 100. */
const restarts = Number(process.env.KV_NIXL_RESTARTS ?? 10);
/** Decides which operation gets which fault. The timing depends on the machine. */
const seed = process.env.KV_SEED ?? "addon";
/**
 * Short, so that a lost message is given up soon. The deadline is generous for a machine that
 * stalls.
 */
const times = { leaseMs: 4000, requestTimeoutMs: 5000, deadlineMs: 120_000, longMs: 5000 };
/** vLLM's default: a heartbeat every 5 s. */
const VLLM_LEASE_MS = 30_000;

const LOAD = { requests, seed, clients: 24, times, deathEvery: 80 };
const LOADS: Readonly<Record<"pull" | "push", FaultLoad>> = {
  pull: { ...LOAD, connector: pullConnector },
  push: { ...LOAD, connector: pushConnector, atOnce: 0.6, numBlocks: 192, layerwise: true },
};

const fake = (backend: "UCX" | "LIBFABRIC", name: "pull" | "push") =>
  fakeNixlFixture(backend, seededRandom(`${seed} ${name} ${backend}`), times.longMs);
const processes = (name: "pull" | "push", faults = true) =>
  multiProcessFixture({ connector: name, seed: `${seed} ${name}`, lateMs: times.longMs, faults });

describe.each([
  ["a fake NIXL library with UCX", fakeMissing, fake.bind(null, "UCX")],
  ["a fake NIXL library with LIBFABRIC", fakeMissing, fake.bind(null, "LIBFABRIC")],
  ["NIXL and UCX, each engine in its own process", nixlMissing, processes],
] as const)("faults over %s (missing: %s)", (_, missing, fixture) => {
  it.skipIf(missing).each(["pull", "push"] as const)(
    `%s: ${requests} requests: each ends with the right bytes or a typed error, and nothing stays registered, held or in flight`,
    async (name) => {
      const report = await faultRunOn(await fixture(name), LOADS[name]);
      console.info(JSON.stringify(report));
      expect(report.violations).toEqual([]);
      expect(report.left).toEqual({});
      const total = Object.values(report.outcomes).reduce((sum, count) => sum + count, 0);
      expect(total).toBe(requests);
      // A connector that refuses everything would pass the rest.
      expect(report.outcomes.ok ?? 0).toBeGreaterThan(requests * 0.3);
      expect(report.kills).toBeGreaterThan(0);
    },
    1_800_000,
  );
});

describe.skipIf(nixlMissing)(
  `SIGKILL and restart at one address, over NIXL and UCX, each engine in its own process (${nixlMissing ?? "found"})`,
  () => {
    it.each([
      ["pull", { connector: pullConnector }],
      ["push", { connector: pushConnector, atOnce: 0.5 }],
    ] as const)(
      `vllm#49238, sglang#34289, %s: ${restarts} times, every request ends, the first success comes within a heartbeat, nothing leaks, no byte is wrong`,
      async (name, load) => {
        const report = await restartRunOn(processes(name, false), {
          ...load,
          seed: `${seed} ${name}`,
          restarts,
          leaseMs: VLLM_LEASE_MS,
          deadlineMs: 60_000,
        });
        console.info(JSON.stringify(report));
        expect(report).toMatchObject({ restarts, violations: [] });
        expect(report.left).toEqual({});
        expect(report.outcomes.ok ?? 0).toBeGreaterThan(restarts);
      },
      3_600_000,
    );
  },
);
