import { expect } from "vitest";
import { type CallOptions, plain, prefill, type TransferParams } from "./completion.js";
import type { VllmServer } from "./server.js";
import { prompt } from "./tiny-peer.js";
import { until } from "./until.js";

/**
 * A prompt whose blocks a vLLM prefill worker holds for a decode worker, according to P's metrics.
 */
export interface HeldPrompt {
  readonly params: TransferParams;
  /** The share of P's cache that was in use before. */
  readonly before: number;
}

export const usage = (p: VllmServer) => p.metric("vllm:kv_cache_usage_perc");
/**
 * The number of requests whose lease expired because no D read their blocks. vLLM counts them once
 * for each rank.
 */
export const expired = async (p: VllmServer) =>
  (await p.metric("vllm:nixl_num_kv_expired_reqs_total")) / p.tp;

/** The number of expired requests whose notification reached P after the lease, on all ranks. */
export const notifiedLate = async (p: VllmServer) =>
  (await p.metric("vllm:nixl_num_notifications_after_expiry_total")) / p.tp;

/**
 * Sends a prefill request and checks that P holds its blocks afterwards. Returns the transfer
 * parameters.
 */
export async function prefillAndHold(
  p: VllmServer,
  tokens: readonly number[],
  options: CallOptions = {},
): Promise<HeldPrompt> {
  const before = await usage(p);
  const params = await prefill(p.url, tokens, options);
  expect(params).toMatchObject({
    tp_size: p.tp,
    remote_num_tokens: tokens.length,
    transfer_mode: p.kind.mode,
  });
  await until(async () => (await usage(p)) > before, "P holds the blocks");
  return { params, before };
}

/**
 * Waits until P's cache usage is not above `before`. A vLLM prefill worker handles notifications
 * only when it computes something, so each check sends it a small request.
 */
export function untilFreed(p: VllmServer, before: number, timeoutMs = 60_000): Promise<void> {
  const holds = async () => {
    await nudge(p);
    return (await usage(p)) <= before;
  };
  return until(holds, "P has freed the blocks", { timeoutMs });
}

/** Sends a small request, so that the server runs a step. */
export const nudge = (p: VllmServer) => plain(p.url, [20, 30], 1);

/** Waits, and sends P a small request about once a second meanwhile. */
export async function waitSeconds(p: VllmServer, seconds: number): Promise<void> {
  const end = Date.now() + seconds * 1000;
  await until(
    async () => {
      await nudge(p);
      return Date.now() >= end;
    },
    `${seconds} s have passed`,
    { timeoutMs: seconds * 1000 + 120_000, everyMs: 1000 },
  );
}

/** A new `X-Request-Id` for each request. */
export const freshId = () => crypto.randomUUID();

/**
 * A request id of D for the request that has this id at P. Push matches the two legs by the common
 * part of their ids.
 */
export function otherLegId(remoteRequestId: unknown): string {
  const base = String(remoteRequestId).replace(/-[0-9a-f]{8}$/, "");
  return `${base}-${freshId().slice(0, 8)}`;
}

/**
 * A prompt that differs from `prompt(length)`, and from the variants with other salts, in every
 * token.
 */
export const promptVariant = (length: number, salt: number) =>
  prompt(length).map((token) => ((token + 37 * salt) % 1000) + 10);
