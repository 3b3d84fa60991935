import { expect, test } from "vitest";
import { leaseChecks } from "./pair-doctor.js";

// advice.test.ts has queue times with and without a long enough lease.

test("queue times beyond the largest bucket have no number, and a server without any gives no advice", () => {
  const queueTime = { requests: 200, p99Seconds: Number.POSITIVE_INFINITY };
  const [check] = leaseChecks({ role: "prefill" }, { role: "decode", queueTime }, 30_000);
  expect(check?.found).toContain("longer than the metric's largest bucket");
  expect(check?.fix).toContain("kv_connector_extra_config further on both");
  expect(JSON.parse(JSON.stringify(check?.details))).toMatchObject({ p99Seconds: null });
  expect(leaseChecks({ role: "prefill" }, { role: "decode" }, 30_000)).toEqual([]);
});
