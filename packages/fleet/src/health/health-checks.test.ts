import { type Clock, KvError, systemRandom } from "@kv/interface";
import { expect, test } from "vitest";
import type { InstanceGet, InstanceGetRequest } from "../pairing/engine-facts.js";
import { InstancePool } from "../routing/instance-pool.js";
import { roundRobin } from "../routing/routing.js";
import { HealthChecks } from "./health-checks.js";

function setUp(probe: (request: InstanceGetRequest) => Promise<number>) {
  const timers: (() => void)[] = [];
  const clock: Clock = {
    now: () => 0,
    setTimer(run) {
      timers.push(run);
      return { cancel: () => void timers.splice(timers.indexOf(run), 1) };
    },
  };
  const pool = new InstancePool({
    role: "decode",
    instances: [{ url: "http://d" }],
    routing: roundRobin(),
    clock,
    random: systemRandom(),
    times: { coolDownMs: 1, maxCoolDownMs: 1, slowReturnMs: 1 },
  });
  const get: InstanceGet = async (request) => ({ status: await probe(request), body: "" });
  const settings = { intervalMs: 10, timeoutMs: 5, path: "/health", failures: 2 };
  const checks = new HealthChecks([pool], get, settings, clock);
  /**
   * Waits for the end of a round of checks: the first one begins at once, the others by their
   * timer.
   */
  let isFirst = true;
  const round = async () => {
    if (!isFirst) timers.shift()?.();
    isFirst = false;
    await expect.poll(() => timers.length).toBe(1);
  };
  return { pool, checks, timers, round };
}

const failed = (stage?: string) =>
  new KvError("KV_PROXY_UPSTREAM_FAILED", "x", { details: { stage } });

test.each([
  [
    "two failed checks in a row eject an instance, and a successful one returns it",
    [503, failed(), 404, 500],
    ["up", "ejected", "returning", "returning"],
  ],
  [
    "one check that cannot connect makes an instance unavailable, and the next good one available at once",
    [200, failed("connect"), 200],
    ["up", "unreachable", "up"],
  ],
])("%s", async (_what, results, expected) => {
  const left = [...results];
  const { pool, round } = setUp(async (request) => {
    expect(request).toEqual({ role: "decode", url: "http://d", path: "/health", timeoutMs: 5 });
    const result = left.shift() ?? 200;
    if (typeof result === "number") return result;
    throw result;
  });
  const states: unknown[] = [];
  for (const _ of results) {
    await round();
    states.push(pool.status()[0]?.state);
  }
  expect(states).toEqual(expected);
});

test("closed health checks leave no timer, and ignore the last result", async () => {
  let answer = (_status: number) => {};
  const answered = new Promise<number>((resolve) => {
    answer = resolve;
  });
  const { pool, checks, timers } = setUp(() => answered);
  checks[Symbol.dispose]();
  answer(503);
  await answered;
  expect([timers.length, pool.status()[0]?.last_error]).toEqual([0, null]);
});
