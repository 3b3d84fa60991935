import { type Clock, KvError } from "@kv/interface";
import { expect, test } from "vitest";
import { createInstancePool } from "./instances.js";
import { roundRobin } from "./routing.js";

function setUp(urls: readonly string[]) {
  let nowMs = 0;
  const clock: Clock = { now: () => nowMs, setTimer: () => ({ cancel() {} }) };
  const pool = createInstancePool({ role: "prefill", urls, routing: roundRobin(), clock, coolDownMs: 1000 });
  const next = () => pool.visit({ requestId: "r" }, new Set());
  return { pool, next, advance: (ms: number) => (nowMs += ms) };
}

const unreachable = new KvError("KV_PROXY_UPSTREAM_FAILED", "x", { details: { stage: "connect" } });

test("each in turn, those excluded left out, undefined when none is left", () => {
  const { pool, next } = setUp(["a", "b"]);
  const visits = [next(), next(), next()];
  expect(visits.map((visit) => visit?.instance.url)).toEqual(["a", "b", "a"]);
  const both = new Set(visits.flatMap((visit) => (visit === undefined ? [] : [visit.instance])));
  expect(pool.visit({ requestId: "r" }, both)).toBeUndefined();
});

test("an instance that could not be reached is left out for a while, unless there is no other", () => {
  const { pool, next, advance } = setUp(["a", "b"]);
  next()?.failed(unreachable);
  expect(pool.available()).toBe(1);
  expect([next(), next()].map((visit) => visit?.instance.url)).toEqual(["b", "b"]);
  next()?.failed(unreachable);
  expect(pool.available()).toBe(0);
  expect(next()).toBeDefined();
  advance(1000);
  expect(pool.available()).toBe(2);
});

test("an instance that answered is there, whatever it answered", () => {
  const { pool, next } = setUp(["a", "b"]);
  next()?.failed(new KvError("KV_PROXY_UPSTREAM_FAILED", "answered 500"));
  expect(pool.available()).toBe(2);
  expect(pool.status()[0]).toMatchObject({ failures: 1, consecutive_failures: 1, in_flight: 0 });
  expect(pool.status()[0]?.last_error?.message).toBe("answered 500");
});

test("a visit ends once", () => {
  const { pool, next } = setUp(["a"]);
  const visit = next();
  next();
  visit?.succeeded();
  visit?.failed(unreachable);
  visit?.abandoned();
  expect(pool.status()[0]).toMatchObject({ requests: 2, in_flight: 1, failures: 0, available: true });
});
