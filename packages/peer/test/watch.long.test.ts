// A long suite: watches a pair over many rounds.

import { once } from "node:events";
import { type AddressInfo, createServer as createSocket } from "node:net";
import { METRICS } from "@kv/connector";
import { systemClock } from "@kv/interface";
import { type FakeUpstream, sendJson, startUpstream } from "@kv/testing/http/fake-upstream";
import { rawClient } from "@kv/testing/http/raw-client";
import { isLongRun } from "@kv/testing/long-run";
import { expect, onTestFinished, test } from "vitest";
import { WATCH_METRICS_LIMITS } from "../src/cli/watch-command.js";
import { EngineServer } from "../src/http/engine-server.js";
import { parsePrometheusText } from "../src/http/prometheus-text.js";
import { openRecording } from "../src/recording/recording.js";
import {
  findingLine,
  ServerCounters,
  sharedAddresses,
  wideAddresses,
} from "../src/watch/findings.js";
import {
  type CanaryReference,
  requireAnswers,
  Watch,
  type WatchedPair,
} from "../src/watch/watch.js";
import { runKvPeer, spawnKvPeer } from "./run-kv-peer.js";
import { METADATA, tokensOf } from "./sample-recording.js";
import { type Served, serveSample } from "./served.js";

const TRIES = isLongRun ? 100 : 20;
/** `KV_WATCH_ROUNDS=10000 npx vitest run packages/peer/test/watch.long.test.ts` runs more. */
const ROUNDS = Number(process.env["KV_WATCH_ROUNDS"] ?? (isLongRun ? 100 : 10));
/** Three blocks of 32 tokens, all of them full. */
const LENGTH = 96;
const BLOCKS = LENGTH / METADATA.blockSize;

const served = (options: Parameters<typeof serveSample>[0] = {}) =>
  serveSample({ lengths: [LENGTH], ...options });

async function referenceOf(
  { folder }: Served,
  tokens?: readonly number[],
): Promise<CanaryReference> {
  const recording = await openRecording(folder);
  const [prompt] = recording.manifest.prompts;
  return {
    from: "the recording",
    kv: await recording.kv(prompt as NonNullable<typeof prompt>),
    tokens,
  };
}

/** Watches from one of the servers; by default that one alone. */
function watchOf(
  { transport, sideChannel, server }: Served,
  pairs: readonly WatchedPair[] = [{ prefill: server, decode: undefined }],
  reference?: CanaryReference,
): Watch {
  const canary = { prompt: tokensOf(LENGTH), outputTokens: 4 };
  const clock = systemClock();
  return new Watch({ pairs, reference, ...canary, transport, sideChannel, clock });
}

/** An HTTP server whose answers are fixed, by path. */
async function answering(answers: Readonly<Record<string, unknown>>): Promise<FakeUpstream> {
  const upstream = await startUpstream(({ path, response }) =>
    sendJson(response, answers[path] ?? {}, path in answers ? 200 : 404),
  );
  onTestFinished(() => upstream.close());
  return upstream;
}

const models = { data: [{ id: "m" }] };
/** Where nothing answers. */
const GONE = "http://127.0.0.1:1";

test(`a corrupted block is found within one round, in ${TRIES} of ${TRIES} tries, and the next round is clean`, async () => {
  let damage: ((kv: Uint8Array) => void) | undefined;
  const p = await served({ served: (kv) => damage?.(kv) });
  const watch = watchOf(p, undefined, await referenceOf(p));
  let state = 12_345;
  const next = (below: number) => {
    state = (state * 1_103_515_245 + 12_345) % 2 ** 31;
    return Math.floor((state / 2 ** 31) * below);
  };
  let found = 0;
  let clean = 0;
  for (let attempt = 0; attempt < TRIES; attempt++) {
    const block = next(BLOCKS * METADATA.blockLengthsBytes.length);
    const length = METADATA.blockLengthsBytes[0] ?? 0;
    const at = block * length + next(length);
    const flipped = 1 + next(255);
    damage = (kv) => {
      kv[at] = (kv[at] ?? 0) ^ flipped;
    };
    const { findings } = await watch.round();
    const region = METADATA.regionNames?.[Math.floor(block / BLOCKS)] ?? "";
    if (findings.some(({ id, found: text }) => id === "watch.kv-differs" && text.includes(region)))
      found += 1;
    damage = undefined;
    if ((await watch.round()).findings.length === 0) clean += 1;
  }
  expect({ found, clean }).toEqual({ found: TRIES, clean: TRIES });
});

const TIMEOUT_MS = 60_000 + ROUNDS * 200;
test(`no false alarm in ${ROUNDS} rounds; the cost of each is reported, and nothing stays allocated`, {
  timeout: TIMEOUT_MS,
}, async () => {
  const p = await served();
  const watch = watchOf(p);
  const bytes = BLOCKS * METADATA.blockLengthsBytes.reduce((sum, length) => sum + length, 0);
  for (let number = 1; number <= ROUNDS; number++) {
    const { findings, cost } = await watch.round();
    expect(findings).toEqual([]);
    expect(cost).toMatchObject({
      kvBytes: bytes,
      prompts: 1,
      promptTokens: LENGTH,
      outputTokens: 0,
    });
  }
  await expect.poll(() => p.prefill.blocks.used).toBe(0);
  const metrics = parsePrometheusText(watch.metrics());
  expect(metrics.sum("kv_watch_rounds_total")).toBe(ROUNDS);
  expect(metrics.sum("kv_watch_kv_read_bytes_total")).toBe(ROUNDS * bytes);
  expect(metrics.sum("kv_watch_round_duration_seconds_count")).toBe(ROUNDS);
  expect(metrics.sum("kv_watch_findings_total")).toBe(0);
});

test("without a recording two P's are compared with each other: the finding names both", async () => {
  const good = await served();
  const { network } = good;
  const bad = await served({ network, served: (kv) => kv.fill(1, 0, 8) });
  const watch = watchOf(good, [
    { prefill: good.server, decode: undefined },
    { prefill: bad.server, decode: undefined },
  ]);
  const first = await watch.round();
  expect(first.findings).toMatchObject([
    { id: "watch.kv-differs", details: { server: bad.server.url } },
  ]);
  expect(first.fresh).toEqual(first.findings);
  const line = findingLine(first.findings[0] as (typeof first.findings)[0]);
  expect(line).toContain(`differs from that of ${good.server.url} in 1 of 4 regions`);
  expect(line).toMatch(/wrong text and status 200; remedy: drain this P/);
  expect((await watch.round()).fresh).toEqual([]);
});

test("D's tokens are compared with the reference's", async () => {
  const p = await served({ numBlocks: 16, leaseMs: 500 });
  const answer = { choices: [{ token_ids: [1, 2, 9, 4] }] };
  const d = new EngineServer(
    (await answering({ "/v1/models": models, "/v1/completions": answer })).url,
  );
  const round = (tokens: readonly number[]) =>
    referenceOf(p, tokens).then((reference) =>
      watchOf(p, [{ prefill: p.server, decode: d }], reference).round(),
    );
  expect((await round([1, 2, 9, 4])).findings).toEqual([]);
  const { findings, cost } = await round([1, 2, 3, 4]);
  expect(findings).toMatchObject([
    {
      id: "watch.tokens-differ",
      details: { server: d.url },
      found: expect.stringMatching(/^token 2 of the canary is 9 and not 3 /),
    },
  ]);
  expect(cost.outputTokens).toBe(4);
});

test("a fleet that is half down: the other pair is checked, and a single round is an error that names the server", async () => {
  const p = await served();
  const gone = { prefill: new EngineServer(GONE), decode: undefined };
  const round = await watchOf(p, [gone, { prefill: p.server, decode: undefined }]).round();
  expect(round.findings).toMatchObject([{ id: "watch.unreachable", details: { server: GONE } }]);
  expect(round.cost.prompts).toBe(1);
  expect(() => requireAnswers(round)).toThrow(
    /1 of the servers do not answer: http:\/\/127\.0\.0\.1:1 /,
  );
});

test("counters that grow are found once; a restarted server counts from its new value", () => {
  const counters = new ServerCounters("http://p");
  const page = (after: number, failed: number) =>
    parsePrometheusText(
      `${METRICS.notificationsAfterExpiry}_total ${after}\n${METRICS.failedTransfers}_total ${failed}\n`,
    );
  expect(counters.compare(page(3, 5), 0)).toEqual([]);
  expect(counters.compare(page(4, 5), 1)).toMatchObject([
    { id: "watch.notifications-after-expiry", found: expect.stringMatching(/grew by 1 to 4$/) },
  ]);
  expect(counters.compare(page(4, 7), 2)).toMatchObject([{ id: "watch.failed-transfers" }]);
  expect(counters.compare(page(0, 0), 3)).toEqual([]);
  expect(counters.compare(page(0, 1), 4)).toMatchObject([{ id: "watch.failed-transfers" }]);
});

test("blocks that stay in use for 90 s without a request are found; a request in between starts the time again", () => {
  const counters = new ServerCounters("http://p");
  const page = (running: number) =>
    parsePrometheusText(`vllm:kv_cache_usage_perc 0.25\nvllm:num_requests_running ${running}\n`);
  const kinds = (running: number, nowMs: number) =>
    counters.compare(page(running), nowMs).map(({ id }) => id);
  expect([kinds(0, 0), kinds(0, 60_000), kinds(1, 80_000), kinds(0, 100_000)].flat()).toEqual([]);
  expect(kinds(0, 190_000)).toEqual(["watch.blocks-stay-allocated"]);
});

test("regions that share a base address are found by name", () => {
  const [a = 0, , c = 0, d = 0] = METADATA.baseAddresses;
  expect(sharedAddresses("p", METADATA)).toEqual([]);
  expect(sharedAddresses("p", { ...METADATA, baseAddresses: [a, a, c, d] })).toMatchObject([
    {
      id: "watch.shared-base-address",
      found: expect.stringContaining("layers.0.self_attn.attn and model.layers.1"),
    },
  ]);
});

test("KV events and side channels on every address are found: as announced, and by the sockets of this host", async () => {
  const sources = {
    "0": {
      enable_kv_cache_events: true,
      endpoint: "tcp://*:5557",
      replay_endpoint: "tcp://127.0.0.1:5558",
    },
    "1": { enable_kv_cache_events: false, endpoint: "tcp://*:5559" },
  };
  const server = new EngineServer((await answering({ "/kv_event_sources": sources })).url);
  const socket = createSocket().listen(0, "0.0.0.0");
  const inner = createSocket().listen(0, "127.0.0.1");
  onTestFinished(() => {
    socket.close();
    inner.close();
  });
  await Promise.all([socket, inner].map((each) => once(each, "listening")));
  const at = (host: string, port: number) => wideAddresses(server, { host, port });
  const events = "KV events listen on tcp://*:5557";
  const widePort = (socket.address() as AddressInfo).port;
  expect(await at("127.0.0.1", widePort)).toEqual([
    events,
    `the side channel listens on every address at port ${widePort}`,
  ]);
  expect(await at("127.0.0.1", (inner.address() as AddressInfo).port)).toEqual([events]);
  expect(await at("0.0.0.0", 5600)).toEqual([events, "the side channel announces 0.0.0.0:5600"]);
});

test("the metrics of a headless prefill server have the connector's names", async () => {
  const p = await served();
  await watchOf(p).round();
  const samples = await p.server.metrics();
  for (const name of [
    METRICS.failedTransfers,
    METRICS.expiredRequests,
    METRICS.notificationsAfterExpiry,
  ])
    expect(samples.sum(`${name}_total`)).toBe(0);
});

test("--once with a server that is down exits with 2 and names it; the webhook gets the finding", async () => {
  const hook = await answering({ "/hook": {} });
  const { code, stdout, stderr } = await runKvPeer(
    `watch --once --pair ${GONE} --webhook ${hook.url}/hook`,
  );
  expect(code).toBe(2);
  expect(stdout).toMatch(
    /^unreachable {2}http:\/\/127\.0\.0\.1:1: .*\nround 1: 1 finding; cost \d+ ms/,
  );
  expect(stderr).toMatch(/1 of the servers do not answer: .* \[KV_PROXY_UPSTREAM_FAILED\]/);
  expect(hook.seen[0]?.json).toMatchObject({
    kind: "unreachable",
    server: GONE,
    remedy: expect.any(String),
  });
});

test("--metrics-port serves the rounds at /metrics and nothing else; SIGINT ends the program", async () => {
  const child = spawnKvPeer(`watch --pair ${GONE} --metrics-port 0`);
  onTestFinished(() => void child.kill("SIGKILL"));
  let stderr = "";
  child.stderr.on("data", (piece) => (stderr += piece));
  const url = () => /metrics at (http:\S+)/.exec(stderr)?.[1];
  await expect.poll(url, { timeout: 20_000 }).toBeDefined();
  const metrics = async () => parsePrometheusText(await (await fetch(url() ?? "")).text());
  await expect
    .poll(async () => (await metrics()).sum("kv_watch_rounds_total"), { timeout: 20_000 })
    .toBe(1);
  expect((await metrics()).sum("kv_watch_findings_total")).toBe(1);
  expect((await fetch(new URL("/", url()))).status).toBe(404);
  const { maxConnectionsPerAddress } = WATCH_METRICS_LIMITS;
  const held = await Promise.all(
    Array.from({ length: maxConnectionsPerAddress + 1 }, () => rawClient(url() ?? "")),
  );
  expect(await Promise.race(held.map(({ closed }) => closed))).toMatch(/^HTTP\/1\.1 503 /);
  for (const { socket } of held) socket.destroy();
  child.kill("SIGINT");
  const [code] = await once(child, "close");
  expect(code).toBe(0);
});

test.each([
  ["no pair", "--json", /required option/],
  ["three servers", "--pair http://a,http://b,http://c", /has 3 servers; a pair has one or two/],
  ["a side channel", "--pair 127.0.0.1:5600", /is not a URL/],
  ["no recording", "--pair http://a --against /nowhere", /cannot be read/],
  ["a tolerance of bytes", "--pair http://a --tolerance 1", /bytes are compared/],
])("bad input to watch (%s) is an error with exit code 2", async (_, args, message) => {
  const { code, stderr } = await runKvPeer(`watch --once ${args}`);
  expect(code).toBe(2);
  expect(stderr).toMatch(message);
});
