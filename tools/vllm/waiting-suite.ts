import { recordedLog } from "@kv/testing/recorded-log";
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

/** It expires long before the peer has room. A heartbeat adds two thirds of it. */
const OUR_LEASE_SECONDS = 12;
const TOKENS = prompt(100);
const OUTPUT_TOKENS = 8;
/** So many tokens take a minute or more. */
const LONG = 16_384;
/** The peer sends one every sixth of its lease of 15 s. */
const BEATS = 8;

/** One request at a time, also beyond the positions that the model was made for. */
export const ONE_LONG_REQUEST = [
  "--max-num-seqs",
  "1",
  "--max-model-len",
  String(LONG),
  "--hf-overrides",
  JSON.stringify({ max_position_embeddings: LONG }),
];

/** Heartbeats while a request waits, a notification when one is aborted, or nothing. */
export function waitingSuite(server: () => VllmServer): void {
  let ours: OurPrefill;
  let recorded: ReturnType<typeof recordedLog>;
  let busy: AbortController;
  beforeAll(() => untilRepacks(server()));

  beforeEach(async () => {
    recorded = recordedLog();
    busy = new AbortController();
    const { log } = recorded;
    ours = await openOurPrefill({ kind: server().kind, leaseSeconds: OUR_LEASE_SECONDS, log });
  });
  afterEach(async () => {
    busy.abort();
    await ours?.close();
  });

  /** Else a waiting request also waits for a handshake. */
  async function paired() {
    await handedOver(ours.url, server(), TOKENS, 1);
    await ours.freed();
    recorded.events.length = 0;
  }

  /** Until it is aborted. */
  async function keepBusy() {
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
    expect(recorded.logged("lease-expired")).toEqual([]);
    expect(ours.held()).toBe(4);
    busy.abort();
    expect(await answer).toEqual(await plain(ours.url, TOKENS, OUTPUT_TOKENS));
    await ours.freed();
    expect(recorded.logged("lease-expired")).toEqual([]);
  });

  test("client aborts while its request waits at D: our blocks are freed; in pull by a notification, before the lease expires", async () => {
    await keepBusy();
    const { params, decode } = await prefilled(ours.url, server().url, TOKENS);
    const client = new AbortController();
    const answer = decode(OUTPUT_TOKENS, { signal: client.signal });
    await until(() => beats().length > 0, "the peer knows the request");
    client.abort();
    await expect(answer).rejects.toThrow();
    await ours.freed();
    if (server().kind.mode === "pull") {
      expect(ours.tap.notifications).toContain(`${params.remote_request_id}:1`);
      expect(recorded.logged("lease-expired")).toEqual([]);
    }
  });

  test("no D reads the blocks: they are freed when the lease expires", async () => {
    await prefill(ours.url, TOKENS, { id: freshId() });
    expect(ours.held()).toBe(4);
    await ours.freed();
    expect(recorded.logged("lease-expired")).not.toEqual([]);
  });
}
