import { type Clock, KvError, type LogFields, silentLog, systemRandom } from "@kv/interface";
import { expect, test } from "vitest";
import { InstancePool, type InstancePoolOptions } from "./instance-pool.js";
import { type Routing, roundRobin } from "./routing.js";

function setUp(urls: readonly string[], options: Partial<InstancePoolOptions> = {}) {
  let nowMs = 0;
  const clock: Clock = { now: () => nowMs, setTimer: () => ({ cancel() {} }) };
  let chance = 0.5;
  const events: string[] = [];
  const record = (event: string, fields: LogFields = {}) =>
    events.push(`${event} ${fields.instance}: ${fields.before} to ${fields.after}`);
  const pool = new InstancePool({
    role: "prefill",
    instances: urls.map((url) => ({ url })),
    routing: roundRobin(),
    clock,
    random: { ...systemRandom(), next: () => chance },
    times: { coolDownMs: 1000, maxCoolDownMs: 3000, slowReturnMs: 1000 },
    outlierDetection: {
      consecutiveFailures: 5,
      baseEjectionTimeMs: 30_000,
      maxEjectionTimeMs: 70_000,
    },
    log: { ...silentLog, info: record, warn: record },
    ...options,
  });
  const next = () => pool.visit({ requestId: "r" }, new Set());
  return {
    pool,
    events,
    next,
    states: () => pool.status().map(({ state }) => state),
    fail(index: number, times: number) {
      for (let time = 0; time < times; time += 1) pool.list()[index]?.begin().failed(answered503);
    },
    advance: (ms: number) => (nowMs += ms),
    toss: (value: number) => (chance = value),
  };
}

const silent = new KvError("KV_PROXY_UPSTREAM_FAILED", "x", { details: { stage: "answer" } });
const answered503 = new KvError("KV_PROXY_UPSTREAM_FAILED", "x", { details: { stage: "status" } });
const unreachable = new KvError("KV_PROXY_UPSTREAM_FAILED", "x", { details: { stage: "connect" } });

test("instances take turns without the excluded ones; undefined when none is left", () => {
  const { pool, next } = setUp(["a", "b"]);
  const visits = [next(), next(), next()];
  expect(visits.map((visit) => visit?.instance.url)).toEqual(["a", "b", "a"]);
  const both = new Set(visits.flatMap((visit) => (visit === undefined ? [] : [visit.instance])));
  expect(pool.visit({ requestId: "r" }, both)).toBeUndefined();
});

test("an unreachable instance is left out for a while, unless there is no other", () => {
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

test("an instance that answered stays available, whatever it answered", () => {
  const { pool, next } = setUp(["a", "b"]);
  next()?.failed(new KvError("KV_PROXY_UPSTREAM_FAILED", "answered 500"));
  expect(pool.available()).toBe(2);
  expect(pool.status()[0]).toMatchObject({ failures: 1, consecutive_failures: 1, in_flight: 0 });
  expect(pool.status()[0]?.last_error?.message).toBe("answered 500");
});

test("a visit counts only its first outcome", () => {
  const { pool, next } = setUp(["a"]);
  const visit = next();
  next();
  visit?.succeeded();
  visit?.failed(unreachable);
  visit?.abandoned();
  expect(pool.status()[0]).toMatchObject({
    requests: 2,
    in_flight: 1,
    failures: 0,
    available: true,
  });
});

test("the cool-down doubles with each failure in a row, up to a limit", () => {
  const { pool, next, advance } = setUp(["a"]);
  for (const coolDownMs of [1000, 2000, 3000, 3000]) {
    next()?.failed(unreachable);
    advance(coolDownMs - 1);
    expect(pool.available()).toBe(0);
    advance(1);
    expect(pool.available()).toBe(1);
  }
});

test("F3: failed visits in a row eject an instance, whatever it answered; one at a time tries it, and each that fails leaves it out for longer", () => {
  const { pool, next, fail, states, advance, events } = setUp(["a", "b"]);
  fail(0, 4);
  pool.list()[0]?.begin().abandoned();
  expect(states()).toEqual(["up", "up"]);
  fail(0, 1);
  expect(pool.status()[0]).toMatchObject({ state: "ejected", available: false, ejections: 1 });
  expect([next(), next()].map((visit) => visit?.instance.url)).toEqual(["b", "b"]);
  // A late failure of a visit that began before changes nothing.
  fail(0, 1);
  for (const outMs of [30_000, 60_000, 70_000, 70_000]) {
    advance(outMs - 1);
    expect(states()).toEqual(["ejected", "up"]);
    advance(1);
    expect(pool.status()[0]).toMatchObject({ state: "half-open", available: true });
    const visits = [next(), next(), next()];
    const attempts = visits.filter((visit) => visit?.instance.url === "a");
    expect(attempts).toHaveLength(1);
    expect(pool.status()[0]).toMatchObject({ state: "half-open", available: false });
    for (const visit of visits)
      if (visit === attempts[0]) visit?.failed(answered503);
      else visit?.succeeded();
  }
  advance(70_000);
  pool.list()[0]?.begin().succeeded();
  expect(pool.status()[0]).toMatchObject({ state: "returning", consecutive_failures: 0 });
  fail(0, 5);
  advance(30_000);
  expect(pool.status()[0]).toMatchObject({ state: "half-open", ejections: 6 });
  expect(events).toEqual([
    "instance-ejected a: up to ejected",
    ...Array(4).fill("instance-ejected a: half-open to ejected"),
    "instance-returned a: half-open to returning",
    "instance-ejected a: returning to ejected",
  ]);
});

test("F3: a success ends the row", () => {
  const { pool, fail, states } = setUp(["a", "b"]);
  for (let round = 0; round < 3; round += 1) {
    fail(0, 4);
    pool.list()[0]?.begin().succeeded();
  }
  expect(states()).toEqual(["up", "up"]);
});

test("F3: visits never eject the last instance; one that becomes the last is tried without limit", async () => {
  const { pool, next, fail, states } = setUp(["a", "b", "c"]);
  for (const index of [0, 1, 2]) fail(index, 9);
  expect(states()).toEqual(["ejected", "ejected", "up"]);
  expect(pool.available()).toBe(1);
  await pool.drain({ url: "c" });
  expect(states()).toEqual(["half-open", "half-open", "draining"]);
  const urls = [next(), next(), next(), next()].map((visit) => visit?.instance.url);
  expect(urls.sort()).toEqual(["a", "a", "b", "b"]);
  expect(pool.available()).toBe(2);
  fail(0, 1);
  expect(states()[0]).toBe("half-open");
});

test("F3: what fails at all instances is the fault of none", () => {
  const { fail, states } = setUp(["a", "b", "c"]);
  for (let round = 0; round < 9; round += 1) for (const index of [0, 1, 2]) fail(index, 1);
  expect(states()).toEqual(["up", "up", "up"]);
});

test("F3: checks and visits share one state: a good check returns what checks ejected, not what visits did", () => {
  const { pool, fail, states, events } = setUp(["a", "b"]);
  const [a] = pool.list();
  fail(0, 5);
  a?.checked(undefined, 2);
  expect(states()).toEqual(["ejected", "up"]);
  a?.checked(silent, 2);
  a?.checked(silent, 2);
  fail(0, 1);
  a?.begin().succeeded();
  expect(states()).toEqual(["ejected", "up"]);
  a?.checked(undefined, 2);
  expect(states()).toEqual(["returning", "up"]);
  a?.checked(unreachable, 2);
  fail(0, 5);
  expect(states()).toEqual(["unreachable", "up"]);
  a?.checked(undefined, 2);
  expect(states()).toEqual(["returning", "up"]);
  expect(events).toEqual([
    "instance-ejected a: up to ejected",
    "instance-returned a: ejected to returning",
    "instance-unreachable a: returning to unreachable",
    "instance-returned a: unreachable to returning",
  ]);
});

test("failed checks eject an instance, a successful one returns it, and its share of requests grows", () => {
  const { pool, next, advance, toss } = setUp(["a", "b"]);
  const [a] = pool.list();
  a?.checked(silent, 2);
  expect(pool.status()[0]?.state).toBe("up");
  a?.checked(silent, 2);
  expect(pool.status()[0]).toMatchObject({ state: "ejected", available: false });
  expect([next(), next()].map((visit) => visit?.instance.url)).toEqual(["b", "b"]);
  a?.checked(undefined, 2);
  expect(pool.status()[0]).toMatchObject({ state: "returning", available: true });
  toss(0.5);
  expect([next(), next()].map((visit) => visit?.instance.url)).toEqual(["b", "b"]);
  toss(0);
  expect(next()?.instance.url).toBe("a");
  advance(600);
  toss(0.5);
  expect([next(), next()].map((visit) => visit?.instance.url).sort()).toEqual(["a", "b"]);
  advance(400);
  expect(pool.status()[0]?.state).toBe("up");
});

test("a draining instance finishes its visits, takes no more, and is gone when it is removed", async () => {
  const { pool, next } = setUp(["a", "b"]);
  const visit = next();
  let gone = false;
  const removed = pool.remove({ url: "a" }).then(() => (gone = true));
  expect(pool.status()[0]).toMatchObject({ state: "draining", in_flight: 1 });
  expect([next(), next()].map((one) => one?.instance.url)).toEqual(["b", "b"]);
  await Promise.resolve();
  expect(gone).toBe(false);
  visit?.succeeded();
  await removed;
  expect(pool.status().map(({ url }) => url)).toEqual(["b"]);
  pool.add({ url: "a" });
  expect(pool.available()).toBe(2);
  expect(() => pool.add({ url: "a" })).toThrow("given twice");
  await expect(pool.drain({ url: "c" })).rejects.toThrow("no prefill instance c");
});

test("ranks of one server are added, drained and removed one by one", async () => {
  const { pool } = setUp(["a"]);
  for (const dataParallelRank of [0, 1]) pool.add({ url: "a", dataParallelRank });
  expect(() => pool.add({ url: "a", dataParallelRank: 1 })).toThrow("a@1 is given twice");
  await pool.drain({ url: "a", dataParallelRank: 1 });
  expect(pool.status().map(({ state }) => state)).toEqual(["up", "up", "draining"]);
  await pool.remove({ url: "a" });
  expect(pool.status().map((one) => one.data_parallel_rank)).toEqual([0, 1]);
  await expect(pool.remove({ url: "a" })).rejects.toMatchObject({ hint: "there are a@0, a@1" });
});

/**
 * Strategies keep what they know of a list: a new list at each request would cost more with each
 * instance.
 */
test("the strategy gets the same list while no instance changes: after a return from ejection, and after a failure", () => {
  const lists = new Set<readonly unknown[]>();
  const routing: Routing = {
    name: "first",
    choose(candidates) {
      lists.add(candidates);
      return candidates[0];
    },
  };
  const options = { routing, outlierDetection: undefined };
  const { pool, next, toss } = setUp(["a", "b", "c", "d"], options);
  const [, b] = pool.list();
  b?.checked(silent, 1);
  b?.checked(undefined, 1);
  for (let at = 0; at < 10; at += 1) {
    toss(at % 2);
    next();
  }
  expect(lists.size).toBe(2);
  for (let at = 0; at < 10; at += 1) {
    const first = next();
    first?.failed(new KvError("KV_PROXY_UPSTREAM_FAILED", "answered 500"));
    const second = pool.visit(
      { requestId: "r" },
      new Set(first === undefined ? [] : [first.instance]),
    );
    expect(second?.instance).not.toBe(first?.instance);
  }
  expect(lists.size).toBe(3);
});
