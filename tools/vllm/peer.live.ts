import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { zmqSideChannel } from "@kv/connector";
import { nixlTransport } from "@kv/nixl";
import {
  bytesInProcess,
  diffRecordings,
  engineServer,
  load,
  loadReport,
  openHeadlessPrefill,
  openRecording,
  pairDoctor,
  readTarget,
  record,
} from "@kv/peer";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { handshakeTimeouts, onceMoreAfterTimeout } from "./once-more.js";
import { showLogs, startVllm, type VllmServer } from "./server.js";
import { PEER_VLLM, prompt } from "./tiny-peer.js";
import { until } from "./until.js";

// `kv-peer` against real vLLM servers: what the README of the package promises to a person who has two of them.

const LEASE_SECONDS = 30;
const OUTPUT_TOKENS = 16;
const PROMPTS = [prompt(100), prompt(40)];

const transport = nixlTransport();
const sideChannel = zmqSideChannel();
const folder = mkdtempSync(join(tmpdir(), "kv-peer-live-"));
let p: VllmServer;
let d: VllmServer;

beforeEach(({ onTestFailed }) => onTestFailed(() => showLogs(p, d)));
afterAll(async () => {
  await sideChannel.close();
  await transport.close();
  rmSync(folder, { recursive: true, force: true });
});

const examine = () =>
  pairDoctor({
    prefill: readTarget(p.url),
    decode: readTarget(d.url),
    sideChannel,
    openServer: (url) => engineServer(url, { timeoutMs: 30_000 }),
    moveBytes: (question) => bytesInProcess(question, 120_000),
    timeoutMs: 30_000,
    bytes: { write: true },
  });

describe("TP 1 to TP 1", () => {
  beforeAll(async () => {
    const extra = { kv_lease_duration: LEASE_SECONDS };
    p = await startVllm({ name: "peer-p", extra });
    d = await startVllm({ name: "peer-d", extra });
  });
  afterAll(async () => {
    await p?.stop();
    await d?.stop();
  });

  test("the doctor finds nothing to fail, knows the hash's factors, and names tcp as the way", async () => {
    const { checks } = await examine();
    expect(checks.filter(({ status }) => status === "fail")).toEqual([]);
    const found = (id: string) => checks.find((check) => check.id === id)?.found;
    expect(found("compatibility.pair")).toBe("equal");
    expect(found("compatibility.prefill")).toContain(`vllm_version "${PEER_VLLM}.0"`);
    expect(found("bytes.prefill-transport")).toContain("tcp/lo");
  });

  test("a load with aborts and silent readers: the server has all of its blocks back", async () => {
    const server = engineServer(p.url, { timeoutMs: 30_000 });
    const result = await load({
      server,
      transport,
      sideChannel,
      promptTokens: [100, 300, 40],
      concurrency: 3,
      requests: 20,
      abortShare: 0.2,
      noNotifyShare: 0.2,
      leaseMs: LEASE_SECONDS * 1000,
      freeWithinMs: 60_000,
    });
    const report = loadReport(
      result,
      { url: p.url, vllmVersion: undefined },
      { maxFailed: 0, maxLeakedBlocks: 0 },
    );
    expect(report.reasons).toEqual([]);
    expect(report.leaks.known).toBe(true);
    expect(report.leaks.expiredRequests).toBe(report.requests.unnotified);
  });

  test("two recordings of a pair are equal, and a decode worker makes the recorded tokens of the served one", async () => {
    const [prefill, decode] = [p, d].map(({ url }) => engineServer(url, { timeoutMs: 30_000 }));
    const made = (name: string) =>
      onceMoreAfterTimeout(
        () =>
          record({
            folder: join(folder, name),
            prefill: prefill as NonNullable<typeof prefill>,
            decode: decode as NonNullable<typeof decode>,
            transport,
            sideChannel,
            prompts: PROMPTS,
            outputTokens: OUTPUT_TOKENS,
          }),
        handshakeTimeouts(d),
      );
    await made("one");
    const manifest = await made("two");
    const [one, two] = [await openRecording(join(folder, "one")), await openRecording(join(folder, "two"))];
    expect(await diffRecordings(one, two)).toEqual([]);

    const recorded = await openHeadlessPrefill({
      recording: one,
      transport,
      sideChannel,
      sideChannelHost: "127.0.0.1",
      sideChannelPort: 0,
      leaseMs: 600_000,
      numBlocks: 32,
    });
    try {
      for (const [index, tokens] of PROMPTS.entries()) {
        const tokensMade = await onceMoreAfterTimeout(async () => {
          const params = await recorded.prefill(`recorded-${index}-${performance.now()}`, tokens);
          return decode?.decode(tokens, params, OUTPUT_TOKENS);
        }, handshakeTimeouts(d));
        expect(tokensMade).toEqual(manifest.prompts[index]?.made);
      }
      await until(() => recorded.blocks.used === 0, "the decode worker has said that it read all");
    } finally {
      await recorded.close();
    }
  });
});
