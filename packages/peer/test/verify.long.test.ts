// A long suite: verifies pairs with planted faults.

import { readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { RdmaDevice, UcxProtocol } from "@kv/nixl";
import { reportOfChecks } from "@kv/program";
import { type FakeUpstream, startUpstream } from "@kv/testing/http/fake-upstream";
import { afterEach, describe, expect, test } from "vitest";
import { EngineServer } from "../src/http/engine-server.js";
import { devicesOf, type LaneEvidence, laneChecks, readLog } from "../src/verify/lane.js";
import { verify } from "../src/verify/verify.js";
import type { SeenDeployment } from "../src/verify/verify-checks.js";
import { runKvPeer } from "./run-kv-peer.js";

// Servers that publish what vLLM's own classes of 0.33 write to /metrics.
// apps/demo/test/verify-*.test.ts have engines that move KV.

/**
 * Of a D after 0, 1 and 2 prompts, made by the metric classes of vLLM 0.33: each READ in one
 * transfer of 256 MiB, at 0.52 GB/s.
 */
const PAGES = readFileSync(
  new URL("fixtures/metrics-tcp-between-hosts.txt", import.meta.url),
  "utf8",
).split("---\n");
const PROMPT_TOKENS = 8192;
const IDLE_PAGE = PAGES[0] ?? "";

const open: FakeUpstream[] = [];
afterEach(async () => {
  for (const server of open.splice(0)) await server.close();
});

/** A deployment whose D publishes the next page with each prompt that the front end gets. */
async function deployment(pages = PAGES) {
  let prompts = 0;
  const serve = async (metrics: () => string, counts: boolean) => {
    const server = await startUpstream(({ path, response }) => {
      const json = (body: object) =>
        response.setHeader("content-type", "application/json").end(JSON.stringify(body));
      if (path === "/metrics") return void response.end(metrics());
      if (path === "/v1/models") return void json({ data: [{ id: "large" }] });
      if (counts) prompts += 1;
      json({ choices: [{ text: " a", token_ids: [1, 2, 3] }] });
    });
    open.push(server);
    return new EngineServer(server.url);
  };
  return {
    front: await serve(() => "", true),
    prefill: [await serve(() => IDLE_PAGE, false)],
    decode: [await serve(() => pages[Math.min(prompts, pages.length - 1)] ?? "", false)],
    requests: 2,
    promptTokens: PROMPT_TOKENS,
  };
}

const device = (name: string, gigabitsPerSecond?: number): RdmaDevice => ({
  name,
  efa: false,
  link: "InfiniBand",
  ports: ["4: ACTIVE"],
  ...(gigabitsPerSecond === undefined ? {} : { gigabitsPerSecond }),
});
const NOTHING: LaneEvidence = {
  logs: {},
  reached: {},
  here: { prefill: false, decode: false },
  devices: {},
};
const BOTH_RDMA = {
  devices: { prefill: [device("mlx5_0", 400)], decode: [device("mlx5_4", 400)] },
};

async function verified(evidence: Partial<LaneEvidence>, pages?: string[]) {
  const { checks, verdict } = await verify({
    ...(await deployment(pages)),
    lane: async () => ({ ...NOTHING, ...evidence }),
  });
  const failed = checks.filter(({ status }) => status === "fail").map(({ id }) => id);
  return { verdict, failed, check: (id: string) => checks.find((each) => each.id === id) };
}

describe("a deployment between two hosts, by vLLM 0.33's metrics", () => {
  test("vllm#52607: 0.52 GB/s where both hosts have RDMA of 400 Gb/s fails as TCP instead of RDMA, though no log names the lane", async () => {
    const { verdict, failed, check } = await verified(BOTH_RDMA);
    expect(verdict).toBe("fail");
    expect(failed).toEqual(["lane.tcp-instead-of-rdma"]);
    expect(check("transfer.moved")?.found).toBe(
      "2 of 2 prompts: 536,870,912 bytes in 2 transfers, READ by D; D computed 0 of 16,384 prompt tokens",
    );
    expect(check("lane.tcp-instead-of-rdma")?.found).toMatch(
      /^no log names the lane, and 0\.52 GB\/s is 1\.0 % of what RDMA \(mlx5_0, 400 Gb\/s at P, mlx5_4, 400 Gb\/s at D\) gives/,
    );
    expect(check("lane.slow")?.found).toContain(
      "where the devices carry 50.00 GB/s: 520.0 ms for each transfer",
    );
  });

  test("its progress counts the answers of the reference too, and an interrupt between two of them ends it", async () => {
    const given: number[] = [];
    await verify({ ...(await deployment()), progress: (done) => void given.push(done) });
    expect(given).toEqual([1, 2, 3, 4]);

    const stop = new AbortController();
    const interrupted = verify({
      ...(await deployment()),
      signal: stop.signal,
      progress: (done) => {
        if (done === 3) stop.abort();
      },
    });
    await expect(interrupted).rejects.toMatchObject({ code: "KV_REQUEST_ABORTED" });
  });

  test("the same numbers where neither host has RDMA: nothing is known, and nothing fails", async () => {
    const { failed, check } = await verified({ devices: { prefill: [], decode: [] } });
    expect(failed).toEqual([]);
    expect(check("lane.unknown")).toMatchObject({
      status: "note",
      found: expect.stringContaining("best that both hosts have: TCP"),
      fix: expect.stringContaining("UCX_PROTO_INFO=y"),
    });
    expect(check("lane.post-time")?.found).toBe(
      "0.8 % of the time, 4.0 ms, for 1024 descriptors of a transfer",
    );
  });

  test("D's log names RDMA, and the bandwidth does not: slow is a warning", async () => {
    const protocols: UcxProtocol[] = [
      { operation: "READ", range: "0..inf", how: "zero-copy", lanes: "rc_mlx5/mlx5_4:1" },
    ];
    const { verdict, failed, check } = await verified({
      ...BOTH_RDMA,
      logs: { decode: { protocols, provider: undefined } },
    });
    expect({ verdict, failed }).toEqual({ verdict: "warn", failed: [] });
    expect(check("lane.best")?.found).toMatch(
      /^UCX over zero-copy rc_mlx5\/mlx5_4:1 \(the log of decode\); best .* RDMA/,
    );
    expect(check("lane.slow")?.status).toBe("warn");
  });

  test("a D whose /metrics count nothing, as with --disable-log-stats, is no proof: it fails", async () => {
    const { verdict, failed } = await verified({}, ["vllm:num_requests_running 0\n"]);
    expect({ verdict, failed }).toEqual({ verdict: "fail", failed: ["transfer.elsewhere"] });
  });

  test("a load that failed counts as loaded in vLLM: without a transfer D has recomputed, whatever it says", async () => {
    const pages = PAGES.map((page) => page.replaceAll(/^vllm:nixl_(?!num_failed).*\n/gm, ""));
    const { failed, check } = await verified({}, pages);
    expect(failed).toEqual(["transfer.recomputed"]);
    expect(check("transfer.recomputed")?.found).toContain(
      "the rest it counts as loaded, though nothing was transferred",
    );
  });
});

const MOVED = {
  transfers: 4,
  bytes: 4e6,
  transferSeconds: 0.01,
  postSeconds: 0.001,
  descriptors: 400,
};
const over = (how: string, operation: UcxProtocol["operation"] = "READ") => ({
  protocols: [{ operation, range: "0..inf", how: "zero-copy", lanes: how }],
  provider: undefined,
});
const reached = (how: string) => ({ lanes: over(how).protocols, bytesPerMs: 5e6 });
const lane = (evidence: Partial<LaneEvidence>, change?: object) => {
  const totals = { prefill: { transfers: 0 }, decode: { ...MOVED, ...change } };
  // The checks of the lane read no more of a deployment.
  const deployment = { totals } as unknown as SeenDeployment;
  const checks = laneChecks(deployment, { ...NOTHING, ...evidence });
  return checks.map(({ id, status }) => `${status} ${id}`);
};
const OK = ["ok lane.bandwidth", "ok lane.post-time"];
const logged = (how: string) => ({ logs: { decode: over(how) } });
const reaching = (p: string, d: string) => ({
  reached: { prefill: reached(p), decode: reached(d) },
});
const HERE = { here: { prefill: true, decode: true } };

describe("which lane, by", () => {
  test.each([
    [
      "a log with RDMA where both have it",
      { ...BOTH_RDMA, ...logged("rc_mlx5/mlx5_0:1") },
      "ok lane.best",
    ],
    [
      "a log with TCP where both have RDMA",
      { ...BOTH_RDMA, ...logged("tcp/eth0") },
      "fail lane.tcp-instead-of-rdma",
    ],
    [
      "a log with the provider tcp where both have EFA",
      { ...BOTH_RDMA, logs: { decode: { protocols: [], provider: "tcp" } } },
      "fail lane.tcp-instead-of-rdma",
    ],
    [
      "a log with the provider efa",
      { ...BOTH_RDMA, logs: { decode: { protocols: [], provider: "efa" } } },
      "ok lane.best",
    ],
    [
      "a log with TCP and one host without a device",
      { devices: { prefill: [], decode: [device("mlx5_0")] }, ...logged("tcp/eth0") },
      "ok lane.best",
    ],
    [
      "the log of the side that posts nothing",
      { ...BOTH_RDMA, logs: { prefill: over("tcp/eth0"), decode: over("tcp/eth0", "WRITE") } },
      "note lane.unknown",
    ],
    ["a log with TCP on one host", { ...HERE, ...logged("tcp/lo") }, "fail lane.tcp-on-one-host"],
    [
      "a log with RDMA on one host",
      { ...HERE, ...logged("rc_mlx5/mlx5_0:1") },
      "warn lane.network-on-one-host",
    ],
    [
      "what this host reaches of both",
      { ...HERE, ...reaching("cma/memory", "cma/memory") },
      "ok lane.best",
    ],
    [
      "a D that permits only TCP",
      { ...HERE, ...reaching("cma/memory", "tcp/lo") },
      "fail lane.tcp-on-one-host",
    ],
    [
      "a P that permits only TCP",
      { ...HERE, ...reaching("tcp/lo", "cma/memory") },
      "fail lane.tcp-on-one-host",
    ],
    ["P alone", { ...HERE, reached: { prefill: reached("cma/memory") } }, "note lane.unknown"],
    ["nothing", {}, "note lane.unknown"],
  ])("%s", (_, evidence, expected) => {
    expect(lane(evidence)).toEqual([expected, ...OK]);
  });

  test("short transfers are not judged: vLLM sees their end once in an engine step", () => {
    expect(lane(BOTH_RDMA, { transferSeconds: 0.39 })).toEqual(["note lane.unknown", ...OK]);
    expect(lane(BOTH_RDMA, { transferSeconds: 4 })).toEqual([
      "fail lane.tcp-instead-of-rdma",
      "warn lane.slow",
      "ok lane.post-time",
    ]);
  });

  test("vllm#55434: posting that takes more than half of the time is a warning, over shared memory it is the copy", () => {
    const posting = { transferSeconds: 0.4, postSeconds: 0.3 };
    expect(lane(logged("rc_mlx5/mlx5_0:1"), posting)).toContain("warn lane.posting");
    expect(lane({ ...HERE, ...logged("cma/memory") }, posting)).toContain("ok lane.post-time");
  });
});

test("logs: UCX's last tables, and the provider that NIXL's LIBFABRIC names", () => {
  const log = [
    "(EngineCore pid=7) [1.0] [host:7:0] +-----------+",
    "[1.0] [host:7:0] | inter cfg#1 remote memory read by ucp_get*(multi) |",
    "[1.0] [host:7:0] | 0..inf | zero-copy | rc_mlx5/mlx5_0:1 |",
    "I0101 libfabric_rail_manager.cpp:232] Created 4 rails using provider=efa",
  ].join("\n");
  expect(readLog(log)).toEqual({
    protocols: [
      { operation: "READ", range: "0..inf", how: "zero-copy", lanes: "rc_mlx5/mlx5_0:1" },
    ],
    provider: "efa",
  });
});

test("the devices of a host, from kv-nixl doctor --json; anything else is an error", () => {
  const check = (id: string, details: object) => {
    const status = "ok" as const;
    return { id, area: "machine", title: "", status, found: "", details };
  };
  const report = (...checks: ReturnType<typeof check>[]) => JSON.stringify(reportOfChecks(checks));
  const mlx = device("mlx5_0", 400);
  expect(devicesOf(report(check("machine.rdma.mlx5_0", mlx)), "host.json")).toEqual([mlx]);
  expect(devicesOf(report(check("machine.rdma", { devices: [] })), "host.json")).toEqual([]);
  expect(() => devicesOf(report(), "host.json")).toThrow(
    /host\.json does not name the RDMA devices/,
  );
  expect(() => devicesOf("{}", "host.json")).toThrow(/host\.json does not name the RDMA devices/);
});

test("the command: exit code 1 with the names of what failed, 2 for a server without /metrics and for files that are none", async () => {
  const { front, prefill, decode } = await deployment();
  const command = `verify ${front.url} --prefill ${prefill[0]?.url} --decode ${decode[0]?.url} --requests 2 --prompt-tokens ${PROMPT_TOKENS} --no-bytes`;
  const file = join(tmpdir(), `kv-peer-verify-${process.pid}`);
  writeFileSync(file, "remote memory read by nobody");
  try {
    const tcp = await runKvPeer(`${command} --decode-log ${file}`);
    expect(tcp.stdout).toMatch(
      /^requests\nok {4}answered .*2 prompts of 8,192 tokens, with status 200\n/,
    );
    expect(tcp.stdout).toMatch(/\n(ok|warn): this deployment is disaggregated/);
    expect(tcp.code).toBe(0);
    // Refused before a prompt is sent.
    const bad = await runKvPeer(`${command} --decode-host ${file}`);
    expect(bad).toMatchObject({ code: 2, stderr: expect.stringContaining("RDMA devices") });
  } finally {
    rmSync(file);
  }
  const gone = "http://127.0.0.1:1";
  const down = await runKvPeer(`verify ${front.url} --prefill ${gone} --decode ${gone}`);
  expect(down).toMatchObject({ code: 2, stderr: expect.stringContaining("127.0.0.1:1") });
  const refused = await runKvPeer("verify --prefill http://a --decode http://b");
  expect(refused.code).toBe(2);
});
