// A long suite: loads a pair for seconds.
import { afterEach, expect, test } from "vitest";
import { EngineServer } from "../src/http/engine-server.js";
import { load } from "../src/load/load.js";
import { loadPlot } from "../src/load/load-plot.js";
import {
  type LoadLimits,
  loadReport,
  loadReportSchema,
  loadText,
} from "../src/load/load-report.js";
import { type Served, serveSample } from "./served.js";

// The headless decode engine against the headless prefill server, over real HTTP and ZMQ.
let served: Served | undefined;
afterEach(() => served?.close());

const LIMITS = { maxFailed: 0, maxLeakedBlocks: 0 };
const common = { promptTokens: [100, 40], concurrency: 3, leaseMs: 60_000 };

test("every prompt is read, and the server frees all blocks", async () => {
  served = await serveSample();
  const result = await load({ ...served, ...common, requests: 12 });
  const report = loadReport(result, { url: served.server.url, vllmVersion: "0.33.0" }, LIMITS);
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

test("blocks of unnotified reads are free after the lease: no leak", async () => {
  served = await serveSample({ leaseMs: 1500 });
  const result = await load({ ...served, ...common, leaseMs: 1500, requests: 3, noNotifyShare: 1 });
  expect(result.pulls.reduce((sum, { serverBlocks }) => sum + serverBlocks, 0)).toBe(4 + 2 + 4);
  expect(result.leaks).toMatchObject({ before: 0, atEnd: 0, leaked: 0, heldAlthoughTold: 0 });
});

test("a server that keeps blocks of unnotified reads longer than the given lease exceeds the limit", async () => {
  served = await serveSample({ leaseMs: 600_000 });
  const options = {
    ...served,
    ...common,
    leaseMs: 1,
    freeWithinMs: 1,
    requests: 1,
    leaseMarginMs: 1,
  };
  const result = await load({ ...options, noNotifyShare: 1 });
  const report = loadReport(result, { url: "x", vllmVersion: undefined }, LIMITS);
  expect(report).toMatchObject({ verdict: "fail", leaks: { leaked: 4 } });
  expect(report.reasons.join()).toContain("4 blocks were not free after their lease");
  expect(loadText(report)).not.toContain("is not seen");
  const next = loadReport(await load(options), { url: "x", vllmVersion: undefined }, LIMITS);
  expect(next).toMatchObject({ leaks: { before: 4, leaked: 0 } });
  expect(loadText(next)).toContain("a leak of up to 4 blocks is not seen");
});

test("a server that stops answering fails: its blocks are unknown", async () => {
  served = await serveSample();
  const { server } = served;
  let alive = true;
  const failWhenDead = () => (alive ? undefined : Promise.reject(new Error("connection refused")));
  class DyingServer extends EngineServer {
    override async metrics() {
      await failWhenDead();
      return await super.metrics();
    }
    override async nudge() {
      await failWhenDead();
      await super.nudge();
    }
  }
  const dying = new DyingServer(server.url);
  const progress = () => {
    alive = false;
  };
  const soon = { leaseMs: 1, freeWithinMs: 1, leaseMarginMs: 1 };
  const result = await load({
    ...served,
    ...common,
    ...soon,
    server: dying,
    requests: 1,
    progress,
  });
  expect(result.leaks).toBeUndefined();
  const report = loadReport(result, { url: server.url, vllmVersion: undefined }, LIMITS);
  expect(loadReportSchema.parse(report)).toEqual(report);
  expect(report.verdict).toBe("fail");
  expect(report.reasons.join()).toContain("leaks are unknown");
  expect(loadText(report)).toContain("leaks      unknown");
  expect(loadPlot(result, "a run")).toContain("blocks of the server: unknown");
});

test("a server whose metrics do not show its blocks fails unless that is allowed", async () => {
  served = await serveSample();
  const { server } = served;
  class ServerWithoutMetrics extends EngineServer {
    override metrics = () => Promise.reject(new Error("404"));
  }
  const result = await load({
    ...served,
    ...common,
    server: new ServerWithoutMetrics(server.url),
    requests: 1,
  });
  const verdict = (limits: LoadLimits) =>
    loadReport(result, { url: "x", vllmVersion: undefined }, limits).verdict;
  expect(verdict(LIMITS)).toBe("fail");
  expect(verdict({ ...LIMITS, allowUnknownLeaks: true })).toBe("ok");
});

test("aborted reads leak no blocks", async () => {
  served = await serveSample();
  const result = await load({ ...served, ...common, requests: 6, abortShare: 1 });
  expect(result.pulls.map(({ outcome }) => outcome)).not.toContain("failed");
  expect(result.leaks).toMatchObject({ atEnd: 0, leaked: 0 });
  expect(served.prefill.blocks.used).toBe(0);
});

const pushed = { factors: { transfer_mode: "push" } };

test("push: every prompt is written, and the server frees all blocks", async () => {
  served = await serveSample(pushed);
  const result = await load({ ...served, ...common, requests: 8 });
  const report = loadReport(result, { url: served.server.url, vllmVersion: "0.33.0" }, LIMITS);
  expect(report).toMatchObject({ verdict: "ok", requests: { sent: 8, ok: 8, failed: 0 } });
  expect(report.lengthBytes).toBe(4 * (4 + 2) * 4 * 32_768);
  expect(result.outstanding).toMatchObject({ requests: 0, receives: 0 });
  expect(served.prefill.blocks.used).toBe(0);
});

test("push: the server keeps the blocks of a request without registration for a lease and no longer", async () => {
  served = await serveSample({ ...pushed, leaseMs: 1500 });
  const result = await load({ ...served, ...common, leaseMs: 1500, requests: 3, noNotifyShare: 1 });
  expect(result.pulls.map(({ outcome, lengthBytes }) => [outcome, lengthBytes])).toEqual(
    Array(3).fill(["ok", 0]),
  );
  expect(result.leaks).toMatchObject({ before: 0, atEnd: 0, leaked: 0, heldAlthoughTold: 0 });
});

test("push: aborted requests leak no blocks after the lease", async () => {
  served = await serveSample({ ...pushed, leaseMs: 1500 });
  const result = await load({ ...served, ...common, leaseMs: 1500, requests: 6, abortShare: 1 });
  expect(result.pulls.map(({ outcome }) => outcome)).not.toContain("failed");
  expect(result.leaks).toMatchObject({ atEnd: 0, leaked: 0 });
  expect(served.prefill.blocks.used).toBe(0);
});

test("failed requests are counted by code and exceed the limit", async () => {
  // The cache has room for one prompt, and the server is never notified that it was read.
  served = await serveSample({ numBlocks: 5 });
  const soon = { leaseMs: 1, freeWithinMs: 1, leaseMarginMs: 1, noNotifyShare: 1 };
  const result = await load({ ...served, ...common, ...soon, promptTokens: [100], requests: 8 });
  const report = loadReport(result, { url: "x", vllmVersion: undefined }, LIMITS);
  expect(report.verdict).toBe("fail");
  expect(report.requests.failed).toBeGreaterThanOrEqual(7);
  expect(report.requests.failures.KV_PROXY_UPSTREAM_FAILED?.message).toContain("answered 503");
});
