import { existsSync } from "node:fs";
import { join } from "node:path";
import { systemClock, systemRandom } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import {
  diffRecordings,
  EngineServer,
  load,
  loadReport,
  openRecording,
  pairDoctor,
  readTarget,
  record,
} from "@kv/peer";
import { zmqSideChannel } from "@kv/side-channel";
import { afterAll, expect, test } from "vitest";
import { Watch } from "../../packages/peer/src/watch/watch.js";
import { expired, notifiedLate, untilFreed, waitSeconds } from "./held-blocks.js";
import { servedRecording } from "./served-recording.js";
import { recordingFolder, type VllmServer } from "./server.js";
import { type PeerKind, prompt } from "./tiny-peer.js";
import { handshakeTimedOut, retryAfterTimeout, until } from "./until.js";

const OUTPUT_TOKENS = 16;
const PROMPTS = [prompt(100), prompt(40), prompt(300)];
const TIMEOUT_MS = 60_000;
/**
 * `KV_WATCH_ROUNDS=100 npm run test:vllm -- --only pull-0.33 -t "no false alarm"` is the long form.
 */
const WATCH_ROUNDS = Number(process.env["KV_WATCH_ROUNDS"] ?? 5);

/** What the README of `kv-peer` describes, with a P and a D of vLLM. */
export function pairSuite(prefill: () => VllmServer, decode: () => VllmServer): void {
  const transport = nixlTransport();
  const sideChannel = zmqSideChannel();
  const server = ({ url }: VllmServer) => new EngineServer(url, { timeoutMs: TIMEOUT_MS });
  const folderOf = ({ version, mode }: PeerKind) =>
    recordingFolder(`${mode}-p${prefill().tp}d${decode().tp}-${version}`);
  afterAll(async () => {
    await sideChannel.close();
    await transport.close();
  });

  test("doctor: no check fails, it names the hash factors and the tcp transport, and P frees the blocks", async () => {
    const isNotified = prefill().kind.mode === "pull";
    if (isNotified) await untilFreed(prefill(), 0);
    const unnotified = async () => (await expired(prefill())) - (await notifiedLate(prefill()));
    const before = await unnotified();
    const { checks } = await pairDoctor({
      prefill: readTarget(prefill().url),
      decode: readTarget(decode().url),
      sideChannel,
      timeoutMs: TIMEOUT_MS,
      httpTimeoutMs: TIMEOUT_MS,
      bytes: { write: true, timeoutMs: 2 * TIMEOUT_MS },
    });
    expect(checks.filter(({ status }) => status === "fail")).toEqual([]);
    const found = (id: string) => checks.find((check) => check.id === id)?.found;
    expect(found("compatibility.pair")).toBe("equal");
    expect(found("compatibility.prefill")).toContain(`vllm_version "${prefill().kind.version}.0"`);
    expect(found("bytes.prefill-transport")).toContain("tcp/lo");
    if (!isNotified) return;
    await untilFreed(prefill(), 0);
    // On a busy machine possibly after their lease.
    expect(await unnotified()).toBe(before);
  });

  test("load with aborts and with readers that do not notify: P gets all of its blocks back", async () => {
    const p = prefill();
    const result = await load({
      server: server(p),
      transport,
      sideChannel,
      promptTokens: [100, 300, 40],
      concurrency: 3,
      requests: 20,
      abortShare: 0.2,
      noNotifyShare: 0.2,
      leaseMs: p.leaseSeconds * 1000,
      freeWithinMs: TIMEOUT_MS,
    });
    const about = { url: p.url, vllmVersion: undefined };
    const report = loadReport(result, about, { maxFailed: 0, maxLeakedBlocks: 0 });
    expect(report.reasons).toEqual([]);
    // vLLM counts an expired request once for each rank.
    if (p.kind.mode === "pull")
      expect(report.leaks?.expiredRequests).toBe(report.requests.unnotified * p.tp);
  });

  test(`watch: no false alarm in ${WATCH_ROUNDS} rounds`, async () => {
    // Each lease that ends would be a finding. P counts some a step after it has freed the blocks.
    await untilFreed(prefill(), 0);
    await waitSeconds(prefill(), 2);
    const watch = new Watch({
      pairs: [{ prefill: server(prefill()), decode: server(decode()) }],
      reference: undefined,
      prompt: prompt(128),
      outputTokens: OUTPUT_TOKENS,
      transport,
      sideChannel,
      sideChannelHost: "127.0.0.1",
      sideChannelPort: 0,
      random: systemRandom(),
      clock: systemClock(),
    });
    for (let round = 1; round <= WATCH_ROUNDS; round += 1) {
      const { findings, cost } = await watch.round();
      expect(findings, `round ${round}`).toEqual([]);
      expect(cost.outputTokens).toBe(OUTPUT_TOKENS);
      expect(cost.kvBytes).toBeGreaterThan(0);
    }
  });

  test("a recording of the pair is served to D: D generates the recorded tokens", async () => {
    const [p, d] = [prefill(), decode()];
    const to = folderOf(p.kind);
    const manifest = await retryAfterTimeout(
      () =>
        record({
          folder: to,
          prefill: server(p),
          decode: server(d),
          transport,
          sideChannel,
          prompts: PROMPTS,
          outputTokens: OUTPUT_TOKENS,
        }),
      handshakeTimedOut(d),
    );
    await using recorded = await servedRecording(to, { transport, sideChannel, numBlocks: 32 });
    const hits = await d.metric("vllm:prefix_cache_hits_total");
    for (const [index, tokens] of PROMPTS.entries()) {
      const made = await recorded.decodedBy(d, tokens, OUTPUT_TOKENS);
      expect(made, `prompt ${index}`).toEqual(manifest.prompts[index]?.made);
    }
    await until(() => recorded.blocks.used === 0, "D has read all blocks");
    expect(await d.metric("vllm:prefix_cache_hits_total")).toBe(hits);
  });

  test("diff with the other version's recording: KV and tokens are equal, versions and hashes differ", async ({
    skip,
  }) => {
    const { kind } = prefill();
    const other = { ...kind, version: kind.version === "0.33" ? "0.32" : "0.33" } as const;
    const there = folderOf(other);
    if (!existsSync(join(there, "manifest.json")))
      skip(`nothing was recorded of vLLM ${other.version} yet`);
    const found = await diffRecordings(
      await openRecording(folderOf(kind)),
      await openRecording(there),
    );
    expect(found.filter((each) => each.kind === "result")).toEqual([]);
    const pairing = found.filter((each) => each.kind === "pairing").map(({ where }) => where);
    const named = pairing.map((where) =>
      where.replace(/ rank \d+/, "").replace(/^prompt \d+/, "a prompt"),
    );
    expect(new Set(named)).toEqual(
      new Set([
        "prefill: vLLM",
        "decode: vLLM",
        "prefill: compatibility hash",
        "decode: compatibility hash",
        // vLLM 0.31 and 0.32 do not have this field, and push does not send it.
        ...(kind.mode === "pull" ? ["a prompt: remote_registration_generation"] : []),
      ]),
    );
  });
}
