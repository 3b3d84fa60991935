import { KvError, type Log } from "@kv/interface";
import type { Cluster } from "../cluster/cluster.js";
import type { KvRecord } from "../instance/kv-journal.js";
import { compareKv, fetchRecords } from "./compare-kv.js";
import { type CompletionOutcome, complete } from "./completion-client.js";

/** The outcome of one request, compared with the expected one. */
export interface CheckedRequest {
  readonly promptTokens: number;
  readonly outputTokens: number;
  readonly ttftMs: number;
  /** Time in forward passes of the prefill instance. */
  readonly prefillMs: number;
  /** Time of copies from the prefill instance's device to host memory. */
  readonly saveMs: number;
  readonly transferMs: number;
  /** Time of copies from host memory to the decode instance's device. */
  readonly loadMs: number;
  /** From the first token to the last. */
  readonly decodeMs: number;
  /** From sending the request to the last token. */
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
  readonly control: NegativeControl;
}

export interface CheckOptions {
  readonly prompts: readonly (readonly number[])[];
  /** The tokens that one engine in one process generates from each prompt. */
  readonly expected: readonly (readonly number[])[];
  readonly control: { readonly promptTokens: readonly number[]; readonly expected: readonly number[] };
  /** Makes the request ids of this run unique. */
  readonly runId: string;
  readonly log: Log;
}

/** Sends all prompts at once; compares tokens with the reference and received KV with sent KV; runs the negative control. */
export async function checkRun(cluster: Cluster, options: CheckOptions): Promise<CheckedRun> {
  const { prompts, expected, control, runId, log } = options;
  const { url } = cluster.proxy;
  const ids = prompts.map((_, i) => `${runId}-${i}`);
  const outcomes = await Promise.allSettled(
    prompts.map((promptTokens, i) =>
      complete({ url, requestId: ids[i] ?? "", promptTokens, maxTokens: expected[i]?.length ?? 0 }),
    ),
  );
  // Read before the negative control, which damages KV.
  const received = await recordsOf(cluster.decodes);
  const sent = await waitForSentRecords(cluster.prefills, received, ids);
  const requests = outcomes.map((outcome, i) =>
    checkRequest(outcome, {
      promptTokens: prompts[i]?.length ?? 0,
      expected: expected[i] ?? [],
      kv: compareKv(ids[i] ?? "", sent, received),
    }),
  );
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

function checkRequest(
  outcome: PromiseSettledResult<CompletionOutcome>,
  {
    promptTokens,
    expected,
    kv,
  }: {
    promptTokens: number;
    expected: readonly number[];
    kv: ReturnType<typeof compareKv>;
  },
): CheckedRequest {
  const measured = {
    promptTokens,
    prefillMs: kv.sent?.forward_ms ?? 0,
    saveMs: kv.sent?.save_ms ?? 0,
    transferMs: kv.transfer?.transfer_ms ?? 0,
    loadMs: kv.received?.transfer?.load_ms ?? 0,
    transferBytes: kv.transfer?.length_bytes ?? 0,
    kvEqual: kv.equal,
  };
  if (outcome.status === "rejected") {
    const { message } = KvError.from(outcome.reason, "KV_INTERNAL", "the request failed");
    const times = { ttftMs: 0, decodeMs: 0, totalMs: 0 };
    return { ...measured, ...times, outputTokens: 0, tokensEqual: false, problem: message };
  }
  const { tokens, ttftMs, totalMs } = outcome.value;
  const tokensEqual = sameTokens(tokens, expected);
  const problem = tokensEqual
    ? kv.difference
    : `the tokens are ${tokens.join(" ")}, expected ${expected.join(" ")}`;
  const times = { ttftMs, decodeMs: totalMs - ttftMs, totalMs };
  return { ...measured, ...times, outputTokens: tokens.length, tokensEqual, problem };
}

const RECORD_ATTEMPTS = 20;
const RECORD_PAUSE_MS = 10;

/** With push, the sender records a transfer when it has ended, shortly after the receiver continues. */
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

/** Shows that the comparison of tokens can fail: zeroes one transferred block of a prompt before it is used. */
async function runNegativeControl(options: {
  readonly url: string;
  readonly requestId: string;
  readonly promptTokens: readonly number[];
  readonly expected: readonly number[];
}): Promise<NegativeControl> {
  const { url, requestId, promptTokens, expected } = options;
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
