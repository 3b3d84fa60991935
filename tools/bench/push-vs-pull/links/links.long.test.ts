// A long suite: a benchmark's own test.
import { readFileSync } from "node:fs";
import { virtualClock } from "@kv/transport-memory";
import { expect, test } from "vitest";
import { WAYS } from "../ways.js";
import type { Point } from "../workload.js";
import { decodePath, decodePathSection, POST_MS, STEP_MS } from "./decode-path.js";
import { Processors } from "./processors.js";
import { MODEL, worldOf } from "./sweep.js";
import { openVirtualDeployment, type World } from "./virtual-deployment.js";

const POINT: Point = {
  inputTokens: 1024,
  outputTokens: 2,
  atOnce: 1,
  hitPercent: 0,
  pool: "contiguous",
};
const AT_ONCE = { ...POINT, atOnce: 8 };

/** TTFT of each way at a point. */
async function times(world: World, point: Point, turns?: number): Promise<number[]> {
  const found: number[] = [];
  for (const way of WAYS) {
    const deployment = await openVirtualDeployment(
      way,
      point.pool,
      world,
      turns === undefined ? {} : { turns },
    );
    try {
      found.push(await deployment.ttftMs(point));
    } finally {
      await deployment.close();
    }
  }
  return found;
}

test("a pull has nine hops and a push six; the bytes take their time on the link, and layer-wise push hides them", async () => {
  const still = { ...worldOf(25, 0), rangeMs: 0 };
  const withHops = await times({ ...still, hopMs: 1 }, POINT);
  const without = await times(still, POINT);
  expect(withHops.map((ms, i) => Math.round(ms - (without[i] ?? 0)))).toEqual([9, 6, 6]);
  // 1,025 tokens are 65 blocks of 16.
  const computeMs = (MODEL.forwardMsPer512Tokens * 1025) / 512;
  const bytesMs = (65 * 16 * MODEL.kvBytesPerToken) / still.linkBytesPerMs;
  const [pull = 0, push = 0, layers = 0] = without;
  expect(Math.abs(pull - computeMs - bytesMs)).toBeLessThan(1);
  expect(Math.abs(push - pull)).toBeLessThan(0.1);
  expect(layers).toBeLessThan(computeMs + bytesMs / 3);
}, 60_000);

test("the figures do not depend on how long the clock waits for sockets, and repeat", async () => {
  const world = worldOf(100, 0.25);
  const found = await times(world, AT_ONCE);
  expect(await times(world, AT_ONCE, 72)).toEqual(found);
}, 60_000);

test("work waits for a core, and for its process; what other threads do takes a core only", () => {
  const processors = new Processors(virtualClock(), 2);
  const done = [
    processors.doneInMs("prefill", 10),
    processors.doneInMs("prefill", 5),
    processors.doneInMs("decode", 3),
    processors.doneInMs("proxy", 1),
  ];
  expect(done).toEqual([10, 15, 3, 4]);
  processors.beside(20);
  expect(processors.doneInMs("decode", 1)).toBe(16);
});

test("what requests take of the cores is part of their times", async () => {
  const each = { client: 1, proxy: 1, prefill: 1, decode: 1 };
  const none = { client: 0, proxy: 0, prefill: 0, decode: 0 };
  const noTokens = { main: none, beside: none };
  const costs = { requestMs: { main: each, beside: none }, tokenMs: noTokens };
  const besides = { requestMs: { main: none, beside: each }, tokenMs: noTokens };
  const deployment = await openVirtualDeployment("pull", "contiguous", {
    ...worldOf(25, 0),
    cores: 2,
  });
  try {
    const free = await deployment.ttftMs(POINT);
    // A half of P's is hidden by its pass.
    expect((await deployment.ttftMs(POINT, costs)) - free).toBeCloseTo(3.5, 1);
    expect(await deployment.ttftMs(POINT, besides)).toBeCloseTo(free, 1);
    const freeAtOnce = await deployment.ttftMs(AT_ONCE);
    expect(await deployment.ttftMs(AT_ONCE, costs)).toBeGreaterThan(freeAtOnce);
    expect(await deployment.ttftMs(AT_ONCE, costs)).toBeGreaterThan(
      await deployment.ttftMs(AT_ONCE, besides),
    );
  } finally {
    await deployment.close();
  }
}, 60_000);

test("first-contact.md 9: a long post in D's step delays each token of pull, and of nothing else; the page has the figures", () => {
  const { contiguous, fragmented } = POST_MS;
  const tpot = (way: Parameters<typeof decodePath>[0], postMs: number) =>
    decodePath(way, postMs, 160).tpotMs;
  expect(tpot("pull, posts in D's step", fragmented) / STEP_MS).toBeGreaterThan(1.3);
  expect(tpot("pull, posts in D's step", contiguous) / STEP_MS).toBeLessThan(1.05);
  for (const way of ["push, posts in P's step", "pull, posts on a thread of their own"] as const)
    expect(tpot(way, fragmented)).toBeCloseTo(STEP_MS);
  const ttft = (postMs: number) => decodePath("push, posts in P's step", postMs, 160).ttftMs;
  expect(
    decodePath("pull, posts in D's step", fragmented, 160).ttftMs / ttft(contiguous),
  ).toBeGreaterThan(1.8);
  const page = new URL("../../../../docs/bench/push-vs-pull-links.md", import.meta.url);
  expect(readFileSync(page, "utf8")).toContain(decodePathSection());
});
