import { afterAll, afterEach, beforeAll, beforeEach, expect, test } from "vitest";
import { complete, completionBody, decode, plain, prefill } from "./completion.js";
import { handshakeTimeouts, onceMoreAfterTimeout } from "./once-more.js";
import { type OurPrefill, openOurPrefill } from "./our-prefill.js";
import { showLogs, startVllm, type VllmServer } from "./server.js";
import { prompt, TINY } from "./tiny-peer.js";
import { until } from "./until.js";

// What a real vLLM decode worker says to our prefill side beside reading: that it still waits, that it gave up, that it had a part.

/** Of the peer; it beats every sixth of it. */
const PEER_LEASE_SECONDS = 6;
/** Ours: over long before the peer has room, were it not for the beats. A beat adds two thirds of it. */
const OUR_LEASE_SECONDS = 4;
const TOKENS = prompt(100);
const OUTPUT_TOKENS = 8;
/** Tokens that take a minute and more. */
const LONG = 16_384;
/** More than our lease is long. */
const BEATS = 7;

let d: VllmServer;
let ours: OurPrefill;
let logged: string[];
let busy: AbortController;

beforeAll(async () => {
  d = await startVllm({
    name: "one-at-a-time",
    blocks: 600,
    extra: { kv_lease_duration: PEER_LEASE_SECONDS },
    // One request at a time, of any length: what it says beyond the positions that the model was made for does not matter.
    args: [
      ...["--max-num-seqs", "1", "--max-model-len", String(LONG)],
      ...["--hf-overrides", JSON.stringify({ max_position_embeddings: LONG })],
      "--enable-prefix-caching",
    ],
  });
});
afterAll(() => d?.stop());
beforeEach(async ({ onTestFailed }) => {
  onTestFailed(() => showLogs(d));
  logged = [];
  busy = new AbortController();
  const note = (event: string) => void logged.push(event);
  ours = await openOurPrefill({
    leaseSeconds: OUR_LEASE_SECONDS,
    log: { debug() {}, info: note, warn: note, error: note },
  });
});
afterEach(async () => {
  busy.abort();
  await ours?.instance.close();
});

/** Gives the peer, which computes one request at a time, one that does not end before it is let go of. */
async function keepBusy(): Promise<void> {
  const begun = await d.metric("vllm:num_requests_running");
  expect(begun).toBe(0);
  complete(d.url, completionBody(prompt(64), LONG - 64), busy.signal).catch(() => {});
  await until(async () => (await d.metric("vllm:num_requests_running")) === 1, "the peer is busy");
}

const beats = (id: unknown) =>
  ours.tap.notifications.filter(
    (text) => text.startsWith("HB:") && text.slice(3).split(",").includes(String(id)),
  );

test("a request that waits at the peer keeps its blocks here by heartbeats, far beyond the lease", async () => {
  await keepBusy();
  const params = await prefill(ours.url, TOKENS);
  const answer = decode(d.url, TOKENS, OUTPUT_TOKENS, params);
  await until(() => beats(params.remote_request_id).length >= BEATS, "heartbeats have come");
  expect(ours.held()).toBe(4);
  busy.abort();
  expect(await answer).toEqual(await plain(ours.url, TOKENS, OUTPUT_TOKENS));
  await until(() => ours.held() === 0, "the blocks are freed");
  expect(ours.tap.notifications).toContain(`${params.remote_request_id}:1`);
  expect(logged).not.toContain("lease-expired");
});

test("a client that leaves while its request waits at the peer: the peer says so, and the blocks are free", async () => {
  await keepBusy();
  const params = await prefill(ours.url, TOKENS);
  const client = new AbortController();
  const answer = decode(d.url, TOKENS, OUTPUT_TOKENS, params, client.signal);
  await until(() => beats(params.remote_request_id).length > 0, "the peer knows the request");
  client.abort();
  await expect(answer).rejects.toThrow();
  await until(() => ours.held() === 0, "the blocks are freed");
  expect(ours.tap.notifications).toContain(`${params.remote_request_id}:1`);
  expect(logged).not.toContain("lease-expired");
});

test("a peer that never comes costs the blocks for a lease, not for ever", async () => {
  await prefill(ours.url, TOKENS);
  expect(ours.held()).toBe(4);
  await until(() => ours.held() === 0, "the lease has ended");
  expect(logged).toContain("lease-expired");
});

test("a peer that has the beginning of the prompt cached reads the rest, and still has our tokens", async () => {
  const beginning = prompt(70).map((token) => token + 3);
  const tokens = [...beginning, ...prompt(40)];
  await plain(d.url, beginning, 1);
  const hits = await d.metric("vllm:prefix_cache_hits_total");
  const { params, made } = await onceMoreAfterTimeout(async () => {
    const params = await prefill(ours.url, tokens);
    return { params, made: await decode(d.url, tokens, OUTPUT_TOKENS, params) };
  }, handshakeTimeouts(d));
  expect(made).toEqual(await plain(ours.url, tokens, OUTPUT_TOKENS));
  expect((await d.metric("vllm:prefix_cache_hits_total")) - hits).toBe(2 * TINY.blockSize);
  await until(() => ours.held() === 0, "the blocks are freed");
  expect(ours.tap.notifications).toContain(`${params.remote_request_id}:1`);
});
