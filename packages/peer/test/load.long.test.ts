// A long suite: loads a pair for seconds.

import { describe, expect, test } from "vitest";
import { EngineServer } from "../src/http/engine-server.js";
import { load } from "../src/load/load.js";
import {
  type LoadLimits,
  loadReport,
  loadReportSchema,
  loadText,
} from "../src/load/load-report.js";
import { serveSample } from "./served.js";

// The headless decode engine against the headless prefill server, over real HTTP and ZMQ.
const LIMITS = { maxFailed: 0, maxLeakedBlocks: 0 };
const common = { promptTokens: [100, 40], concurrency: 3, leaseMs: 60_000 };
const soon = { leaseMs: 1, freeWithinMs: 1, leaseMarginMs: 1 };
const reportOf = (result: Parameters<typeof loadReport>[0], limits: LoadLimits = LIMITS) =>
  loadReport(result, { url: "x", vllmVersion: "0.33.0" }, limits);

/** What a lease is for P: in push the blocks of an aborted request wait for its end. */
describe.each([
  ["pull", 60_000],
  ["push", 1500],
])("a P that serves by %s", (mode, leaseMs) => {
  const loaded = async (options: Partial<Parameters<typeof load>[0]>) => {
    const served = await serveSample({ factors: { transfer_mode: mode }, leaseMs });
    const result = await load({ ...served, ...common, leaseMs, ...options });
    return { ...result, served };
  };

  test("gives every prompt, and frees all blocks", async () => {
    const result = await loaded({ requests: 8 });
    const { prefill } = result.served;
    const report = reportOf(result);
    expect(loadReportSchema.parse(report)).toEqual(report);
    expect(report).toMatchObject({
      verdict: "ok",
      requests: { sent: 8, ok: 8, failed: 0 },
      leaks: { before: 0, atEnd: 0, leaked: 0, heldAlthoughTold: 0 },
    });
    // 100 tokens are 4 blocks, 40 are 2, of 4 regions each.
    expect(report.lengthBytes).toBe(4 * (4 + 2) * 4 * 32_768);
    expect(result.outstanding).toMatchObject({ requests: 0, receives: 0 });
    expect(prefill.blocks.used).toBe(0);
    expect(loadText(report)).toContain("ok: every limit was kept");
  });

  test("leaks no blocks of aborted requests", async () => {
    const { pulls, leaks, served } = await loaded({ requests: 6, abortShare: 1 });
    expect(pulls.map(({ outcome }) => outcome)).not.toContain("failed");
    expect(leaks).toMatchObject({ atEnd: 0, leaked: 0 });
    expect(served.prefill.blocks.used).toBe(0);
  });
});

test("a server that keeps blocks of unnotified reads longer than the given lease exceeds the limit", async () => {
  const served = await serveSample({ leaseMs: 600_000 });
  const options = { ...served, ...common, ...soon, requests: 1 };
  const report = reportOf(await load({ ...options, noNotifyShare: 1 }));
  expect(report).toMatchObject({ verdict: "fail", leaks: { leaked: 4 } });
  expect(report.reasons.join()).toContain("4 blocks were not free after their lease");
  expect(loadText(report)).not.toContain("is not seen");
  const next = reportOf(await load(options));
  expect(next).toMatchObject({ leaks: { before: 4, leaked: 0 } });
  expect(loadText(next)).toContain("a leak of up to 4 blocks is not seen");
});

test("a server that stops answering fails: its blocks are unknown", async () => {
  const served = await serveSample();
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
  const server = new DyingServer(served.server.url);
  const progress = () => {
    alive = false;
  };
  const result = await load({ ...served, ...common, ...soon, server, requests: 1, progress });
  expect(result.leaks).toBeUndefined();
  const report = reportOf(result);
  expect(loadReportSchema.parse(report)).toEqual(report);
  expect(report.verdict).toBe("fail");
  expect(report.reasons.join()).toContain("leaks are unknown");
  expect(loadText(report)).toContain("leaks      unknown");
});

test("a server whose metrics do not show its blocks fails unless that is allowed", async () => {
  const served = await serveSample();
  class ServerWithoutMetrics extends EngineServer {
    override metrics = () => Promise.reject(new Error("404"));
  }
  const server = new ServerWithoutMetrics(served.server.url);
  const result = await load({ ...served, ...common, server, requests: 1 });
  expect(reportOf(result).verdict).toBe("fail");
  expect(reportOf(result, { ...LIMITS, allowUnknownLeaks: true }).verdict).toBe("ok");
});

test("failed requests are counted by code and exceed the limit", async () => {
  // The cache has room for one prompt, and the server is never notified that it was read.
  const served = await serveSample({ numBlocks: 5 });
  const unread = { ...common, ...soon, noNotifyShare: 1, promptTokens: [100], requests: 8 };
  const report = reportOf(await load({ ...served, ...unread }));
  expect(report.verdict).toBe("fail");
  expect(report.requests.failed).toBeGreaterThanOrEqual(7);
  expect(report.requests.failures.KV_PROXY_UPSTREAM_FAILED?.message).toContain("answered 503");
});

test("first-contact.md 2: Ctrl-C ends a load without failures, and frees what P computed", async () => {
  const served = await serveSample();
  const stop = new AbortController();
  let legs = 0;
  class SlowServer extends EngineServer {
    override async prefill(...[prompt, call]: Parameters<EngineServer["prefill"]>) {
      legs += 1;
      if (legs === 3) stop.abort();
      // One leg ends in time, another one never.
      if (legs !== 3) return await super.prefill(prompt, call);
      return await new Promise<never>((_, reject) =>
        call?.signal?.addEventListener("abort", () => reject(call.signal?.reason)),
      );
    }
  }
  const server = new SlowServer(served.server.url);
  const result = await load({ ...served, ...common, server, concurrency: 2, signal: stop.signal });
  expect(reportOf(result)).toMatchObject({
    verdict: "ok",
    requests: { ok: 1, aborted: 1, failed: 0 },
  });
  expect(served.prefill.blocks.used).toBe(0);
});
