import { expect } from "vitest";
import { type CallOptions, plain, prefill, type TransferParams } from "./completion.js";
import type { VllmServer } from "./server.js";
import { prompt } from "./tiny-peer.js";
import { until } from "./until.js";

/** A prompt whose blocks a vLLM prefill worker keeps for a reader, according to its metrics. */
export interface KeptPrompt {
  readonly params: TransferParams;
  /** The share of the cache that was in use before. */
  readonly before: number;
}

export const usage = (p: VllmServer) => p.metric("vllm:kv_cache_usage_perc");
/** Requests that no D read within their lease. vLLM counts them once for each rank. */
export const expired = async (p: VllmServer) =>
  (await p.metric("vllm:nixl_num_kv_expired_reqs_total")) / p.tp;

/** Expired requests for which P received the notification after the lease, on all ranks. */
export const toldLate = async (p: VllmServer) =>
  (await p.metric("vllm:nixl_num_notifications_after_expiry_total")) / p.tp;

/** Lets the peer compute a prompt and keep its blocks. Returns the transfer parameters. */
export async function keptPrompt(
  p: VllmServer,
  tokens: readonly number[],
  options: CallOptions = {},
): Promise<KeptPrompt> {
  const before = await usage(p);
  const params = await prefill(p.url, tokens, options);
  expect(params).toMatchObject({
    tp_size: p.tp,
    remote_num_tokens: tokens.length,
    transfer_mode: p.kind.mode,
  });
  await until(async () => (await usage(p)) > before, "the peer keeps the blocks");
  return { params, before };
}

/**
 * Waits until the peer has freed its blocks. A vLLM prefill worker handles notifications only when it computes something,
 * so each check sends it a small request.
 */
export function freedTo(p: VllmServer, before: number, timeoutMs = 60_000): Promise<void> {
  const holds = async () => {
    await nudge(p);
    return (await usage(p)) <= before;
  };
  return until(holds, "the peer has freed the blocks", { timeoutMs });
}

export const nudge = (p: VllmServer) => plain(p.url, [20, 30], 1);

/** Waits for this time, and sends the peer a small request about once a second. */
export async function pass(p: VllmServer, seconds: number): Promise<void> {
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

/** A decode engine's request id for the other leg of this request. Push matches the two legs by the part that their ids have in common. */
export function legOf(remoteRequestId: unknown): string {
  const base = String(remoteRequestId).replace(/-[0-9a-f]{8}$/, "");
  return `${base}-${freshId().slice(0, 8)}`;
}

export const salted = (length: number, salt: number) =>
  prompt(length).map((token) => ((token + 37 * salt) % 1000) + 10);
