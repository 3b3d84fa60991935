import { pushConnector } from "@kv/push";
import { restartRun } from "@kv/testing/faults/restart-run";
import { isLongRun } from "@kv/testing/long-run";
import { expect, test } from "vitest";

/** `npm run test:long -- --only restarts` has 1,000. */
const restarts = Number(process.env.KV_RESTARTS ?? (isLongRun ? 200 : 30));

test(`vllm#49238, sglang#34289: ${restarts} SIGKILLs of P or D at one address: every request ends, the first success comes within a heartbeat, nothing leaks, no byte is wrong`, async () => {
  const report = await restartRun({
    seed: process.env.KV_SEED ?? "push restarts",
    restarts,
    connector: pushConnector,
    atOnce: 0.5,
  });
  console.info(JSON.stringify(report));
  expect(report).toMatchObject({ restarts, violations: [], left: {} });
  expect(report.left).toEqual({});
  // Most requests are sent while both run.
  expect(report.outcomes.ok ?? 0).toBeGreaterThan(restarts);
}, 1_800_000);
