import { expect, test } from "vitest";
import { leaseChecks } from "./lease-check.js";

const look = (p99Seconds: number, leaseMs = 30_000) =>
  leaseChecks({
    prefill: { role: "prefill" },
    decode: { role: "decode", queueTime: { requests: 200, p99Seconds } },
    leaseMs,
  })[0];

test("a lease of twice the queue time is enough, and a shorter one is not", () => {
  expect(look(15)).toMatchObject({
    status: "ok",
    found: expect.stringContaining("a lease lasts 30 s"),
  });
  expect(look(15, 29_000)).toMatchObject({
    status: "warn",
    found: expect.stringContaining(
      "99 % of 200 requests waited at most 15 s in the queue; a lease lasts 29 s",
    ),
    fix: expect.stringContaining(
      "raise kv_lease_duration in kv_connector_extra_config to at least 30 on both servers",
    ),
  });
});

test("queue times beyond the largest bucket have no number", () => {
  const check = look(Number.POSITIVE_INFINITY);
  expect(check?.found).toContain("longer than the metric's largest bucket");
  expect(check?.fix).toContain("kv_connector_extra_config further on both");
  expect(JSON.parse(JSON.stringify(check?.details))).toMatchObject({ p99Seconds: null });
});

test("a server without measured requests gives no advice", () => {
  expect(
    leaseChecks({ prefill: { role: "prefill" }, decode: { role: "decode" }, leaseMs: 30_000 }),
  ).toEqual([]);
});
