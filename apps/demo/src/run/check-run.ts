import { KvError, type Log } from "@kv/interface";
import type { Cluster } from "../cluster/cluster.js";
import type { KvRecord } from "../instance/kv-journal.js";
import { compareKv, fetchRecords } from "./compare-kv.js";
import { type CompletionOutcome, complete } from "./completion-client.js";

/** One request's outcome beside what it should have been. */
export interface CheckedRequest {
  readonly promptTokens: number;
  readonly outputTokens: number;
  readonly ttftMs: number;
  /** In forward passes of the prefill instance; in copies from its device, over the wire, and to the decode instance's device. */
  readonly prefillMs: number;
  readonly saveMs: number;
  readonly transferMs: number;
  readonly loadMs: number;
  /** From the first token to the last, and from the request to the last. */
  readonly decodeMs: number;
  readonly totalMs: number;
  readonly transferBytes: number;
  readonly tokensEqual: boolean;
  readonly kvEqual: boolean;
  /** What is not as it should be. */
  readonly problem: string | undefined;
}

export interface CheckedRun {
  readonly ok: boolean;
  readonly requests: readonly CheckedRequest[];
  readonly control: NegativeControl;
}

export interface CheckOptions {
  readonly prompts: readonly (readonly number[])[];
  /** What one engine in one process makes of each prompt, and of the control's. */
  readonly expected: readonly (readonly number[])[];
  readonly control: { readonly promptTokens: readonly number[]; readonly expected: readonly number[] };
  /** Tells the requests of one run from those of another. */
  readonly runId: string;
  readonly log: Log;
}

/** Sends all prompts at once, and compares tokens with the reference and the KV received with the KV sent. */
export async function checkRun(cluster: Cluster, options: CheckOptions): Promise<CheckedRun> {
  const { prompts, expected, control, runId, log } = options;
  const url = cluster.proxy.url;
  const outcomes = await Promise.allSettled(
    prompts.map((promptTokens, i) =>
      complete({ url, requestId: `${runId}-${i}`, promptTokens, maxTokens: expected[i]?.length ?? 0 }),
    ),
  );
  // Before the control: its damage is no part of what is compared.
  const received = await recordsOf(cluster.decodes);
  const ids = prompts.map((_, i) => `${runId}-${i}`);
  const sent = await sentRecords(cluster.prefills, received, ids);
  const requests = outcomes.map((outcome, i): CheckedRequest => {
    const kv = compareKv(`${runId}-${i}`, sent, received);
    const shared = {
      promptTokens: prompts[i]?.length ?? 0,
      prefillMs: kv.sent?.forward_ms ?? 0,
      saveMs: kv.sent?.save_ms ?? 0,
      transferMs: kv.transfer?.transfer_ms ?? 0,
      loadMs: kv.received?.transfer?.load_ms ?? 0,
      transferBytes: kv.transfer?.length_bytes ?? 0,
      kvEqual: kv.equal,
    };
    if (outcome.status === "rejected") {
      const error = KvError.from(outcome.reason, "KV_INTERNAL", "the request failed");
      const times = { ttftMs: 0, decodeMs: 0, totalMs: 0 };
      return { ...shared, ...times, outputTokens: 0, tokensEqual: false, problem: error.message };
    }
    const { tokens, ttftMs, totalMs } = outcome.value;
    const tokensEqual = sameTokens(tokens, expected[i] ?? []);
    const problem = tokensEqual ? kv.why : `tokens ${tokens.join(" ")}, not ${(expected[i] ?? []).join(" ")}`;
    const times = { ttftMs, decodeMs: totalMs - ttftMs, totalMs };
    return { ...shared, ...times, outputTokens: tokens.length, tokensEqual, problem };
  });
  for (const [index, { problem }] of requests.entries()) {
    if (problem !== undefined) log.error("request-differs", { index, problem });
  }
  const controlled = await runNegativeControl({ url, requestId: `${runId}-control`, ...control });
  if (!controlled.changed)
    log.error("negative-control-failed", { why: "a zeroed block did not change the tokens" });
  if (!controlled.restored)
    log.error("negative-control-failed", { why: "the undamaged prompt gave other tokens" });
  const ok =
    requests.every(({ problem }) => problem === undefined) && controlled.changed && controlled.restored;
  return { ok, requests, control: controlled };
}

/** With push the sender tells of a transfer when it is over, a moment after the receiver went on. */
async function sentRecords(
  members: Cluster["prefills"],
  received: readonly KvRecord[],
  ids: readonly string[],
): Promise<KvRecord[]> {
  for (let attempt = 0; ; attempt++) {
    const sent = await recordsOf(members);
    const untold = ids.some((id) => compareKv(id, sent, received).transfer === undefined);
    if (!untold || attempt >= TELL_ATTEMPTS) return sent;
    await new Promise((resolve) => setTimeout(resolve, TELL_PAUSE_MS));
  }
}

const TELL_ATTEMPTS = 20;
const TELL_PAUSE_MS = 10;

async function recordsOf(members: readonly { readonly url: string }[]): Promise<KvRecord[]> {
  return (await Promise.all(members.map(({ url }) => fetchRecords(url)))).flat();
}

export interface NegativeControl {
  /** The tokens with one block of the received KV zeroed; they must differ from those of the reference. */
  readonly changed: boolean;
  /** The same prompt once more, undamaged. */
  readonly restored: boolean;
}

/**
 * Shows that the comparison of tokens can fail: with one transferred block of the prompt zeroed before it is used, the tokens change;
 * without, they are the reference's again.
 */
export async function runNegativeControl(options: {
  readonly url: string;
  readonly requestId: string;
  readonly promptTokens: readonly number[];
  readonly expected: readonly number[];
}): Promise<NegativeControl> {
  const { url, requestId, promptTokens, expected } = options;
  const ask = (suffix: string, zeroBlock?: number): Promise<CompletionOutcome> =>
    complete({
      url,
      requestId: `${requestId}-${suffix}`,
      promptTokens,
      maxTokens: expected.length,
      ...(zeroBlock === undefined ? {} : { zeroBlock }),
    });
  const same = ({ tokens }: CompletionOutcome) => sameTokens(tokens, expected);
  return { changed: !same(await ask("zeroed", 0)), restored: same(await ask("again")) };
}

export function sameTokens(a: readonly number[], b: readonly number[]): boolean {
  return a.length === b.length && a.every((token, i) => token === b[i]);
}
