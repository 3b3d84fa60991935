import { afterEach, beforeAll, beforeEach, expect, test } from "vitest";
import {
  complete,
  completionBody,
  freshId,
  handedOver,
  plain,
  prefill,
  prefilled,
} from "./completion.js";
import { type OurPrefill, openOurPrefill, untilRepacks } from "./our-prefill.js";
import type { VllmServer } from "./server.js";
import { prompt } from "./tiny-peer.js";
import { until } from "./until.js";

/**
 * Our lease. Without heartbeats it expires long before the peer has room. A heartbeat adds two
 * thirds of it.
 */
const OUR_LEASE_SECONDS = 12;
const TOKENS = prompt(100);
const OUTPUT_TOKENS = 8;
/**
 * A number of tokens that takes a minute or more to generate. `ONE_LONG_REQUEST` sets it as the
 * model's length.
 */
const LONG = 16_384;
/**
 * The number of heartbeats to wait for. The peer sends one every sixth of its own lease of 15 s.
 */
const BEATS = 8;

/**
 * Arguments of a server that computes one request at a time, of up to `LONG` tokens.
 * The tokens beyond the positions that the model was made for do not matter.
 */
export const ONE_LONG_REQUEST = [
  "--max-num-seqs",
  "1",
  "--max-model-len",
  String(LONG),
  "--hf-overrides",
  JSON.stringify({ max_position_embeddings: LONG }),
];

/**
 * What a real vLLM decode worker sends to our prefill side besides reads: heartbeats while a
 * request waits, a notification when a request is aborted, or nothing at all.
 */
export function waitingSuite(server: () => VllmServer): void {
  let ours: OurPrefill;
  let logged: string[];
  let busy: AbortController;
  beforeAll(() => untilRepacks(server()));

  beforeEach(async () => {
    logged = [];
    busy = new AbortController();
    const note = (event: string) => void logged.push(event);
    ours = await openOurPrefill({
      kind: server().kind,
      leaseSeconds: OUR_LEASE_SECONDS,
      log: { debug() {}, info: note, warn: note, error: note },
    });
  });
  afterEach(async () => {
    busy.abort();
    await ours?.close();
  });

  /**
   * Pairs with the peer before it is busy, so that a waiting request does not also wait for a
   * handshake.
   */
  async function paired(): Promise<void> {
    await handedOver(ours.url, server(), TOKENS, 1);
    await until(() => ours.held() === 0, "the blocks are freed");
    logged.length = 0;
  }

  /**
   * Gives the peer a request that runs until it is aborted. The peer computes one request at a
   * time.
   */
  async function keepBusy(): Promise<void> {
    const running = () => server().metric("vllm:num_requests_running");
    await until(async () => (await running()) === 0, "the peer has nothing to do");
    complete(server().url, completionBody(prompt(64), LONG - 64), { signal: busy.signal }).catch(
      () => {},
    );
    await until(async () => (await running()) === 1, "the peer is busy");
  }

  const beats = () => ours.tap.notifications.filter((text) => text.startsWith("HB:"));

  test("request waits at D beyond our lease: heartbeats keep our blocks", async () => {
    await paired();
    await keepBusy();
    const leg = await prefilled(ours.url, server().url, TOKENS);
    const answer = leg.decode(OUTPUT_TOKENS);
    await until(() => beats().length >= BEATS, "heartbeats have come", { timeoutMs: 120_000 });
    expect(logged).not.toContain("lease-expired");
    expect(ours.held()).toBe(4);
    busy.abort();
    expect(await answer).toEqual(await plain(ours.url, TOKENS, OUTPUT_TOKENS));
    await until(() => ours.held() === 0, "the blocks are freed");
    expect(logged).not.toContain("lease-expired");
  });

  test("client aborts while its request waits at D: our blocks are freed; in pull by a notification, before the lease expires", async () => {
    await keepBusy();
    const { params, decode } = await prefilled(ours.url, server().url, TOKENS);
    const client = new AbortController();
    const answer = decode(OUTPUT_TOKENS, { signal: client.signal });
    await until(() => beats().length > 0, "the peer knows the request");
    client.abort();
    await expect(answer).rejects.toThrow();
    await until(() => ours.held() === 0, "the blocks are freed");
    if (server().kind.mode === "pull") {
      expect(ours.tap.notifications).toContain(`${params.remote_request_id}:1`);
      expect(logged).not.toContain("lease-expired");
    }
  });

  test("no D reads the blocks: they are freed when the lease expires", async () => {
    await prefill(ours.url, TOKENS, { id: freshId() });
    expect(ours.held()).toBe(4);
    await until(() => ours.held() === 0, "the lease has ended");
    expect(logged).toContain("lease-expired");
  });
}
