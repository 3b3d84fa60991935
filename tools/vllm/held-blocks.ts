import { expect } from "vitest";
import { freshId, plain, prefill, type Tokens } from "./completion.js";
import type { VllmServer } from "./server.js";
import { prompt } from "./tiny-peer.js";
import { until } from "./until.js";

export const usage = (p: VllmServer) => p.metric("vllm:kv_cache_usage_perc");
/** No D read the blocks. vLLM counts each once a rank. */
export const expired = async (p: VllmServer) =>
  (await p.metric("vllm:nixl_num_kv_expired_reqs_total")) / p.tp;

/** Of these, the notification reached P after the lease. */
export const notifiedLate = async (p: VllmServer) =>
  (await p.metric("vllm:nixl_num_notifications_after_expiry_total")) / p.tp;

/** `asked`: the request at D. */
export async function prefillAndHold(p: VllmServer, tokens: Tokens) {
  /** The share of P's cache that was in use. */
  const before = await usage(p);
  const params = await prefill(p.url, tokens, { id: freshId() });
  expect(params).toMatchObject({
    tp_size: p.tp,
    remote_num_tokens: tokens.length,
    transfer_mode: p.kind.mode,
  });
  await until(async () => (await usage(p)) > before, "P holds the blocks");
  const requestId = otherLegId(params.remote_request_id);
  const asked = { requestId, numPromptTokens: tokens.length, kvTransferParams: params };
  return { params, asked, before };
}

/** A vLLM handles notifications and leases only when it computes something. */
export async function usageNow(p: VllmServer): Promise<number> {
  await nudge(p);
  return usage(p);
}

export function untilFreed(p: VllmServer, before: number, timeoutMs = 60_000): Promise<void> {
  const isFreed = async () => (await usageNow(p)) <= before;
  return until(isFreed, `${p.name} has freed the blocks`, { timeoutMs });
}

const nudge = (p: VllmServer) => plain(p.url, [20, 30], 1);

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

/** Push matches the legs by the common part. */
export function otherLegId(remoteRequestId: unknown): string {
  const base = String(remoteRequestId).replace(/-[0-9a-f]{8}$/, "");
  return `${base}-${freshId().slice(0, 8)}`;
}

/** Differs from variants of other salts in every token. */
export const promptVariant = (length: number, salt: number) =>
  prompt(length).map((token) => ((token + 37 * salt) % 1000) + 10);
