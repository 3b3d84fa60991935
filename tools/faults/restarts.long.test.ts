// A long suite: fault runs over the addon; npm test has those over the memory transport.
import { pullConnector } from "@kv/pull";
import { pushConnector } from "@kv/push";
import { restartRunOn } from "@kv/testing/faults/restart-run";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { describe, expect, it } from "vitest";
import { seed } from "./loads.js";
import { multiProcessFixture } from "./multi-process-fixture.js";

/** `npm run test:long -- --only restarts` has 100. */
const restarts = Number(process.env.KV_NIXL_RESTARTS ?? 10);
/** vLLM's default: a heartbeat every 5 s. */
const LEASE_MS = 30_000;
const CONNECTORS = {
  pull: { connector: pullConnector },
  push: { connector: pushConnector, atOnce: 0.5 },
};

describe.skipIf(nixlMissing)(
  `SIGKILL and restart at one address, over NIXL and UCX, each engine in its own process (${nixlMissing ?? "found"})`,
  () => {
    it.each(["pull", "push"] as const)(
      `vllm#49238, sglang#34289, %s: ${restarts} times, every request ends, the first success comes within a heartbeat, nothing leaks, no byte is wrong`,
      async (name) => {
        const fixture = multiProcessFixture({
          connector: name,
          seed: `${seed} ${name}`,
          faults: false,
        });
        const load = {
          ...CONNECTORS[name],
          seed: `${seed} ${name}`,
          restarts,
          leaseMs: LEASE_MS,
          deadlineMs: 60_000,
        };
        const report = await restartRunOn(fixture, load);
        console.info(JSON.stringify(report));
        expect(report).toMatchObject({ restarts, violations: [] });
        expect(report.left).toEqual({});
        expect(report.outcomes.ok ?? 0).toBeGreaterThan(restarts);
      },
      3_600_000,
    );
  },
);
