import { KvError, type Log } from "@kv/interface";
import type { Cluster } from "../cluster/cluster.js";
import type { KvRecord, KvTransferRecord } from "../instance/kv-journal.js";
import { type CompletionOutcome, complete } from "./completion-client.js";
import type { ExpectedPrompts, PreparedRun } from "./prepare-run.js";

export interface CheckedRequest {
  readonly promptTokens: number;
  readonly outputTokens: number;
  /** Time to first token: `queueMs` to `otherMs` are its parts. */
  readonly ttftMs: number;
  /** Waiting for other requests, at both instances. */
  readonly queueMs: number;
  readonly prefillMs: number;
  /** Time of copies from the prefill instance's device to host memory. */
  readonly saveMs: number;
  /**
   * The decode instance's wait for the KV without the transfer and without the prefill instance's
   * part: at first contact handshake, plan and prepared lists; then the messages and steps around a
   * transfer.
   */
  readonly connectMs: number;
  readonly transferMs: number;
  /** Time of copies from host memory to the decode instance's device. */
  readonly loadMs: number;
  /** From the arrival of the KV to the first token, at the decode instance. */
  readonly firstTokenMs: number;
  /** The rest of the time to first token: HTTP, the proxy, and the digests of this comparison. */
  readonly otherMs: number;
  readonly decodeMs: number;
  readonly totalMs: number;
  readonly transferBytes: number;
  readonly tokensEqual: boolean;
  readonly kvEqual: boolean;
  /** Why the request failed or differs; undefined when all is equal. */
  readonly problem: string | undefined;
}

export interface CheckedRun {
  readonly ok: boolean;
  readonly requests: readonly CheckedRequest[];
  readonly warm: readonly CheckedRequest[];
  readonly control: NegativeControl;
}

export interface CheckOptions extends Omit<PreparedRun, "modelName"> {
  /**
   * The proxy sends both requests of a pushed prompt at once, so the decode instance waits while
   * the prompt is computed.
   */
  readonly atOnce?: boolean | undefined;
  readonly runId: string;
  readonly log: Log;
}

/**
 * Sends all prompts at once; compares tokens with the reference and received KV with sent KV; runs
 * a second round and the negative control.
 */
export async function checkRun(cluster: Cluster, options: CheckOptions): Promise<CheckedRun> {
  const { control, runId, log } = options;
  const { url } = cluster.proxy;
  const requests = await checkRound(cluster, options, { name: runId, ...options });
  const warm = await checkRound(cluster, options, { name: `${runId}-warm`, ...options.warm });
  const controlled = await runNegativeControl({ url, requestId: `${runId}-control`, ...control });
  if (!controlled.changed)
    log.error("negative-control-failed", { why: "a zeroed block did not change the tokens" });
  if (!controlled.restored)
    log.error("negative-control-failed", { why: "the undamaged prompt gave other tokens" });
  const areEqual = [...requests, ...warm].every(({ problem }) => problem === undefined);
  const ok = areEqual && controlled.changed && controlled.restored;
  return { ok, requests, warm, control: controlled };
}

/**
 * Sends the prompts of one round at once. Their KV is compared before the negative control, which
 * damages KV.
 */
async function checkRound(
  cluster: Cluster,
  { atOnce = true, log }: Pick<CheckOptions, "atOnce" | "log">,
  { name, prompts, expected }: { readonly name: string } & ExpectedPrompts,
): Promise<CheckedRequest[]> {
  const ids = prompts.map((_, i) => `${name}-${i}`);
  const { url } = cluster.proxy;
  const outcomes = await Promise.allSettled(
    prompts.map((promptTokens, i) =>
      complete({ url, requestId: ids[i] ?? "", promptTokens, maxTokens: expected[i]?.length ?? 0 }),
    ),
  );
  const received = await recordsOf(cluster.decodes);
  const sent = await waitForSentRecords(cluster.prefills, received, ids);
  const requests = outcomes.map((outcome, i) =>
    checkRequest(outcome, prompts[i] ?? [], expected[i] ?? [], {
      kv: compareKv(ids[i] ?? "", sent, received),
      atOnce,
    }),
  );
  for (const [index, { problem }] of requests.entries()) {
    if (problem !== undefined) log.error("request-differs", { round: name, index, problem });
  }
  return requests;
}

function checkRequest(
  outcome: PromiseSettledResult<CompletionOutcome>,
  prompt: readonly number[],
  expected: readonly number[],
  { kv, atOnce }: { kv: KvComparison; atOnce: boolean },
): CheckedRequest {
  const parts = partsOf(kv, atOnce);
  const transferBytes = kv.transfer?.length_bytes ?? 0;
  const measured = { promptTokens: prompt.length, ...parts, transferBytes, kvEqual: kv.equal };
  if (outcome.status === "rejected") {
    const { message } = KvError.from(outcome.reason, "KV_INTERNAL", "the request failed");
    const times = { ttftMs: 0, otherMs: 0, decodeMs: 0, totalMs: 0 };
    return { ...measured, ...times, outputTokens: 0, tokensEqual: false, problem: message };
  }
  const { tokens, ttftMs, totalMs } = outcome.value;
  const tokensEqual = sameTokens(tokens, expected);
  const problem = tokensEqual
    ? kv.difference
    : `the tokens are ${tokens.join(" ")}, expected ${expected.join(" ")}`;
  const known = Object.values(parts).reduce((sum, ms) => sum + ms, 0);
  const times = {
    ttftMs,
    otherMs: Math.max(0, ttftMs - known),
    decodeMs: totalMs - ttftMs,
    totalMs,
  };
  return { ...measured, ...times, outputTokens: tokens.length, tokensEqual, problem };
}

function partsOf({ sent, received, transfer }: KvComparison, atOnce: boolean) {
  const prefillMs = sent?.forward_ms ?? 0;
  const saveMs = sent?.save_ms ?? 0;
  const prefillQueueMs = sent?.queue_ms ?? 0;
  const { waited_ms: waitedMs = 0, load_ms: loadMs = 0 } = received?.transfer ?? {};
  const transferMs = transfer?.transfer_ms ?? 0;
  const isPush = transfer !== undefined && transfer === sent?.transfer;
  const overlapMs = isPush && atOnce ? prefillQueueMs + prefillMs + saveMs : 0;
  return {
    queueMs: prefillQueueMs + (received?.queue_ms ?? 0),
    prefillMs,
    saveMs,
    connectMs: Math.max(0, waitedMs - overlapMs - transferMs - loadMs),
    transferMs,
    loadMs,
    firstTokenMs: received?.first_token_ms ?? 0,
  };
}

const RECORD_ATTEMPTS = 20;
const RECORD_PAUSE_MS = 10;

/**
 * With push, the sender records a transfer when it has ended, shortly after the receiver continues.
 */
async function waitForSentRecords(
  members: Cluster["prefills"],
  received: readonly KvRecord[],
  ids: readonly string[],
): Promise<KvRecord[]> {
  for (let attempt = 0; ; attempt++) {
    const sent = await recordsOf(members);
    const isComplete = ids.every((id) => compareKv(id, sent, received).transfer !== undefined);
    if (isComplete || attempt >= RECORD_ATTEMPTS) return sent;
    await new Promise((resolve) => setTimeout(resolve, RECORD_PAUSE_MS));
  }
}

async function recordsOf(members: readonly { readonly url: string }[]): Promise<KvRecord[]> {
  return (await Promise.all(members.map(({ url }) => fetchRecords(url)))).flat();
}

export interface NegativeControl {
  /** With one block of the received KV zeroed, the tokens differ from the reference. */
  readonly changed: boolean;
  /** The same prompt without damage gives the tokens of the reference. */
  readonly restored: boolean;
}

/**
 * Shows that the comparison of tokens can fail: zeroes one transferred block of a prompt before it
 * is used.
 */
async function runNegativeControl({
  url,
  requestId,
  promptTokens,
  expected,
}: {
  readonly url: string;
  readonly requestId: string;
} & PreparedRun["control"]): Promise<NegativeControl> {
  const run = async (suffix: string, zeroBlock?: number): Promise<boolean> => {
    const { tokens } = await complete({
      url,
      requestId: `${requestId}-${suffix}`,
      promptTokens,
      maxTokens: expected.length,
      zeroBlock,
    });
    return sameTokens(tokens, expected);
  };
  return { changed: !(await run("zeroed", 0)), restored: await run("again") };
}

export function sameTokens(a: readonly number[], b: readonly number[]): boolean {
  return a.length === b.length && a.every((token, i) => token === b[i]);
}

export async function fetchRecords(url: string): Promise<KvRecord[]> {
  const response = await fetch(`${url}/kv/transfers`);
  const { records } = (await response.json()) as { records: KvRecord[] };
  return records;
}

export interface KvComparison {
  readonly sent: KvRecord | undefined;
  readonly received: KvRecord | undefined;
  /** The transfer, as the side that moved the bytes recorded it. */
  readonly transfer: KvTransferRecord | undefined;
  readonly equal: boolean;
  readonly difference: string | undefined;
}

/**
 * Finds the records of both sides for a client's request and compares the digests of the
 * transferred tokens.
 */
export function compareKv(
  requestId: string,
  sentRecords: readonly KvRecord[],
  receivedRecords: readonly KvRecord[],
): KvComparison {
  const of = (records: readonly KvRecord[]) =>
    records.findLast((record) => record.request_id.startsWith(`cmpl-${requestId}-`));
  const sent = of(sentRecords);
  const received = of(receivedRecords);
  const transfer = [received, sent].find(
    (record) => (record?.transfer?.length_bytes ?? 0) > 0,
  )?.transfer;
  const unequal = (difference: string): KvComparison => ({
    sent,
    received,
    transfer,
    equal: false,
    difference,
  });
  if (sent === undefined) return unequal("no prefill instance recorded its KV");
  if (received === undefined) return unequal("no decode instance recorded its KV");
  if (sent.digests.length === 0 || received.digests.length !== sent.digests.length) {
    return unequal(
      `the sender has ${sent.digests.length} digests and the receiver ${received.digests.length}`,
    );
  }
  // The tokens in the receiver's prefix cache come from an earlier request.
  const first = Math.ceil(received.cached_tokens / received.digest_tokens);
  const differing = sent.digests.findIndex(
    (digest, i) => i >= first && digest !== received.digests[i],
  );
  if (differing < 0) return { sent, received, transfer, equal: true, difference: undefined };
  return unequal(
    `from token ${differing * sent.digest_tokens} on, the received KV differs from the sent KV`,
  );
}
