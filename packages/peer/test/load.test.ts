import { afterEach, expect, test } from "vitest";
import { load } from "../src/decode/load.js";
import { loadPlot } from "../src/decode/load-plot.js";
import { type Gate, loadReport, loadReportSchema } from "../src/decode/load-report.js";
import { loadText } from "../src/decode/load-text.js";
import { type Served, serveSample } from "./served.js";

// The headless decode side against the headless prefill side, over real HTTP and ZMQ.
let served: Served | undefined;
afterEach(() => served?.close());

const GATE = { maxFailed: 0, maxLeakedBlocks: 0 };
const common = { promptTokens: [100, 40], concurrency: 3, leaseMs: 60_000 };

test("every prompt is read, and the server has all of its blocks back", async () => {
  served = await serveSample();
  const result = await load({ ...served, ...common, requests: 12 });
  const report = loadReport(result, { url: served.server.url, vllmVersion: "0.33.0" }, GATE);
  expect(loadReportSchema.parse(report)).toEqual(report);
  expect(report).toMatchObject({
    verdict: "ok",
    requests: { sent: 12, ok: 12, failed: 0 },
    leaks: { before: 0, atEnd: 0, leaked: 0, heldAlthoughTold: 0 },
  });
  // 100 tokens are 4 blocks, 40 are 2, of 4 regions each.
  expect(report.lengthBytes).toBe(6 * (4 + 2) * 4 * 32_768);
  expect(result.outstanding).toMatchObject({ requests: 0, receives: 0 });
  expect(loadText(report)).toContain("ok: every limit was kept");
  expect(loadPlot(result, "a <run>").match(/<title>/g)).toHaveLength(24);
});

test("what the server is not told of is free when the lease has ended: no leak", async () => {
  served = await serveSample({ leaseMs: 1500 });
  const result = await load({ ...served, ...common, leaseMs: 1500, requests: 3, noNotifyShare: 1 });
  expect(result.pulls.reduce((sum, { serverBlocks }) => sum + serverBlocks, 0)).toBe(4 + 2 + 4);
  expect(result.leaks).toMatchObject({ before: 0, atEnd: 0, leaked: 0, heldAlthoughTold: 0 });
});

test("a server that does not free what it was not told of after the lease that was announced fails the gate", async () => {
  served = await serveSample({ leaseMs: 600_000 });
  const result = await load({
    ...served,
    ...common,
    leaseMs: 1,
    freeWithinMs: 1,
    requests: 1,
    noNotifyShare: 1,
    leaseMarginMs: 1,
  });
  const report = loadReport(result, { url: "x", vllmVersion: undefined }, GATE);
  expect(report).toMatchObject({ verdict: "fail", leaks: { leaked: 4 } });
  expect(report.reasons.join()).toContain("4 blocks were not free after their lease");
});

test("a server that no longer answers fails the gate: nothing is known of its blocks", async () => {
  served = await serveSample();
  const { server } = served;
  let alive = true;
  const unless = <T>(ask: () => Promise<T>) => (alive ? ask() : Promise.reject(new Error("it is gone")));
  const dying = {
    ...server,
    metrics: () => unless(server.metrics),
    nudge: () => unless(server.nudge),
  };
  const progress = () => {
    alive = false;
  };
  const soon = { leaseMs: 1, freeWithinMs: 1, leaseMarginMs: 1 };
  const result = await load({ ...served, ...common, ...soon, server: dying, requests: 1, progress });
  expect(result.leaks).toBeUndefined();
  const report = loadReport(result, { url: server.url, vllmVersion: undefined }, GATE);
  expect(loadReportSchema.parse(report)).toEqual(report);
  expect(report.verdict).toBe("fail");
  expect(report.reasons.join()).toContain("nothing is known of leaks");
  expect(loadText(report)).toContain("leaks      not known");
  expect(loadPlot(result, "a run")).toContain("blocks of the server: not known");
});

test("a server whose metrics do not tell of its blocks fails the gate, unless that is allowed", async () => {
  served = await serveSample();
  const { server } = served;
  const mute = { ...server, metrics: () => Promise.reject(new Error("404")) };
  const result = await load({ ...served, ...common, server: mute, requests: 1 });
  const verdict = (gate: Gate) => loadReport(result, { url: "x", vllmVersion: undefined }, gate).verdict;
  expect(verdict(GATE)).toBe("fail");
  expect(verdict({ ...GATE, allowUnknownLeaks: true })).toBe("ok");
});

test("reads that are given up cost the server no block", async () => {
  served = await serveSample();
  const result = await load({ ...served, ...common, requests: 6, abortShare: 1 });
  expect(result.pulls.map(({ outcome }) => outcome)).not.toContain("failed");
  expect(result.leaks).toMatchObject({ atEnd: 0, leaked: 0 });
  expect(served.prefill.blocks.used).toBe(0);
});

const pushed = { factors: { transfer_mode: "push" } };

test("a server that pushes: every prompt is written, and the server has all of its blocks back", async () => {
  served = await serveSample(pushed);
  const result = await load({ ...served, ...common, requests: 8 });
  const report = loadReport(result, { url: served.server.url, vllmVersion: "0.33.0" }, GATE);
  expect(report).toMatchObject({ verdict: "ok", requests: { sent: 8, ok: 8, failed: 0 } });
  expect(report.lengthBytes).toBe(4 * (4 + 2) * 4 * 32_768);
  expect(result.outstanding).toMatchObject({ requests: 0, receives: 0 });
  expect(served.prefill.blocks.used).toBe(0);
});

test("a server that pushes keeps for a lease what nobody offers blocks for, and no longer", async () => {
  served = await serveSample({ ...pushed, leaseMs: 1500 });
  const result = await load({ ...served, ...common, leaseMs: 1500, requests: 3, noNotifyShare: 1 });
  expect(result.pulls.map(({ outcome, lengthBytes }) => [outcome, lengthBytes])).toEqual(
    Array(3).fill(["ok", 0]),
  );
  expect(result.leaks).toMatchObject({ before: 0, atEnd: 0, leaked: 0, heldAlthoughTold: 0 });
});

test("writes that are given up cost the server no block beyond the lease", async () => {
  served = await serveSample({ ...pushed, leaseMs: 1500 });
  const result = await load({ ...served, ...common, leaseMs: 1500, requests: 6, abortShare: 1 });
  expect(result.pulls.map(({ outcome }) => outcome)).not.toContain("failed");
  expect(result.leaks).toMatchObject({ atEnd: 0, leaked: 0 });
  expect(served.prefill.blocks.used).toBe(0);
});

test("requests that fail are counted by code, and fail the gate", async () => {
  // Room for one prompt, which nobody tells the server that it was read.
  served = await serveSample({ numBlocks: 5 });
  const soon = { leaseMs: 1, freeWithinMs: 1, leaseMarginMs: 1, noNotifyShare: 1 };
  const result = await load({ ...served, ...common, ...soon, promptTokens: [100], requests: 8 });
  const report = loadReport(result, { url: "x", vllmVersion: undefined }, GATE);
  expect(report.verdict).toBe("fail");
  expect(report.requests.failed).toBeGreaterThanOrEqual(7);
  expect(report.requests.failures.KV_PROXY_UPSTREAM_FAILED?.message).toContain("answered 503");
});
