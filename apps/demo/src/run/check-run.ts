import { setTimeout as sleep } from "node:timers/promises";
import { KvError, type Log } from "@kv/interface";
import type { Cluster } from "../cluster/cluster.js";
import type { KvRecord, KvTransferRecord } from "../instance/kv-journal.js";
import { type CompletionOutcome, complete } from "./completion-client.js";
import type { ExpectedPrompts, PreparedRun } from "./prepare-run.js";

/** One request, as `--json` prints it but for the last two members. */
export interface CheckedRequest {
  readonly prompt_tokens: number;
  readonly output_tokens: number;
  /** Time to first token: `queue_ms` to `other_ms` are its parts. */
  readonly ttft_ms: number;
  /** Waiting for other requests, at both instances. */
  readonly queue_ms: number;
  readonly prefill_ms: number;
  /** Copies from the prefill instance's device to host memory. */
  readonly save_ms: number;
  /**
   * The decode instance's wait for the KV without transfer and prefill: at first contact handshake,
   * plan and prepared lists; then the messages and steps around a transfer.
   */
  readonly connect_ms: number;
  readonly transfer_ms: number;
  /** Copies from host memory to the decode instance's device. */
  readonly load_ms: number;
  /** From the arrival of the KV. */
  readonly first_token_ms: number;
  /** HTTP, the proxy, and the digests of this comparison. */
  readonly other_ms: number;
  readonly decode_ms: number;
  readonly total_ms: number;
  readonly transfer_bytes: number;
  readonly tokens_equal: boolean;
  readonly kvEqual: boolean;
  /** Why the request failed or differs; undefined when all is equal. */
  readonly problem: string | undefined;
}

export interface CheckedRun {
  readonly ok: boolean;
  readonly requests: readonly CheckedRequest[];
  readonly warm: readonly CheckedRequest[];
  readonly control: {
    /** With one block of the received KV zeroed, the tokens differ from the reference. */
    readonly changed: boolean;
    /** The same prompt without damage gives the tokens of the reference. */
    readonly restored: boolean;
  };
}

export interface CheckOptions extends Omit<PreparedRun, "modelName"> {
  /** With push: the decode instance waits while the prompt is computed. Default: true. */
  readonly atOnce?: boolean | undefined;
  readonly runId: string;
  readonly log: Log;
}

/**
 * Compares tokens with the reference and received KV with sent KV, in two rounds, and shows that
 * the comparison can fail.
 */
export async function checkRun(cluster: Cluster, options: CheckOptions): Promise<CheckedRun> {
  const { runId, log, warm } = options;
  const requests = await checkRound(cluster, options, runId, options);
  const again = await checkRound(cluster, options, `${runId}-warm`, warm);
  const { promptTokens, expected } = options.control;
  const controlTokens = async (suffix: string, zeroBlock?: number) => {
    const requestId = `${runId}-control-${suffix}`;
    const request = { requestId, promptTokens, maxTokens: expected.length, zeroBlock };
    const { tokens } = await complete({ url: cluster.proxy.url, ...request });
    return sameTokens(tokens, expected);
  };
  // After the comparison of KV, as it damages KV.
  const control = {
    changed: !(await controlTokens("zeroed", 0)),
    restored: await controlTokens("again"),
  };
  if (!control.changed)
    log.error("negative-control-failed", { why: "a zeroed block did not change the tokens" });
  if (!control.restored)
    log.error("negative-control-failed", { why: "the undamaged prompt gave other tokens" });
  const areEqual = [...requests, ...again].every(({ problem }) => problem === undefined);
  const ok = areEqual && control.changed && control.restored;
  return { ok, requests, warm: again, control };
}

/** Sends the prompts of one round at once. */
async function checkRound(
  { proxy, prefills, decodes }: Cluster,
  { atOnce = true, log }: CheckOptions,
  round: string,
  { prompts, expected }: ExpectedPrompts,
): Promise<CheckedRequest[]> {
  const ids = prompts.map((_, i) => `${round}-${i}`);
  const outcomes = await Promise.allSettled(
    prompts.map((promptTokens, i) =>
      complete({
        url: proxy.url,
        requestId: ids[i] ?? "",
        promptTokens,
        maxTokens: expected[i]?.length ?? 0,
      }),
    ),
  );
  const recordsOf = async (members: Cluster["prefills"]) =>
    (await Promise.all(members.map(({ url }) => fetchRecords(url)))).flat();
  const received = await recordsOf(decodes);
  let compared: KvComparison[];
  // With push, the sender records a transfer shortly after the receiver continues.
  for (let attempt = 0; ; attempt++) {
    const sent = await recordsOf(prefills);
    compared = ids.map((id) => compareKv(id, sent, received));
    if (attempt >= 20 || compared.every(({ transfer }) => transfer !== undefined)) break;
    await sleep(10);
  }
  return compared.map((kv, index) => {
    const checked = checkRequest(outcomes[index], prompts[index], expected[index], kv, atOnce);
    const { problem } = checked;
    if (problem !== undefined) log.error("request-differs", { round, index, problem });
    return checked;
  });
}

function checkRequest(
  outcome: PromiseSettledResult<CompletionOutcome> | undefined,
  prompt: readonly number[] = [],
  expected: readonly number[] = [],
  kv: KvComparison,
  atOnce: boolean,
): CheckedRequest {
  const parts = partsOf(kv, atOnce);
  let { difference: problem } = kv;
  let tokens: readonly number[] = [];
  let [ttftMs, totalMs] = [0, 0];
  if (outcome?.status === "fulfilled") {
    ({ tokens, ttftMs, totalMs } = outcome.value);
    if (!sameTokens(tokens, expected))
      problem = `the tokens are ${tokens.join(" ")}, expected ${expected.join(" ")}`;
  } else problem = KvError.from(outcome?.reason, "KV_INTERNAL", "the request failed").message;
  const known = Object.values(parts).reduce((sum, ms) => sum + ms, 0);
  return {
    prompt_tokens: prompt.length,
    output_tokens: tokens.length,
    ttft_ms: ttftMs,
    ...parts,
    other_ms: Math.max(0, ttftMs - known),
    decode_ms: totalMs - ttftMs,
    total_ms: totalMs,
    transfer_bytes: kv.transfer?.length_bytes ?? 0,
    tokens_equal: sameTokens(tokens, expected),
    kvEqual: kv.equal,
    problem,
  };
}

function partsOf({ sent, received, transfer }: KvComparison, atOnce: boolean) {
  const { forward_ms = 0, save_ms = 0, queue_ms = 0 } = sent ?? {};
  const { waited_ms = 0, load_ms = 0 } = received?.transfer ?? {};
  const transfer_ms = transfer?.transfer_ms ?? 0;
  const isPush = transfer !== undefined && transfer === sent?.transfer;
  const overlapMs = isPush && atOnce ? queue_ms + forward_ms + save_ms : 0;
  return {
    queue_ms: queue_ms + (received?.queue_ms ?? 0),
    prefill_ms: forward_ms,
    save_ms,
    connect_ms: Math.max(0, waited_ms - overlapMs - transfer_ms - load_ms),
    transfer_ms,
    load_ms,
    first_token_ms: received?.first_token_ms ?? 0,
  };
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
  /** As the side that moved the bytes recorded it. */
  readonly transfer: KvTransferRecord | undefined;
  readonly equal: boolean;
  readonly difference: string | undefined;
}

/** Compares the digests of both sides for a client's request. */
export function compareKv(
  requestId: string,
  sentRecords: readonly KvRecord[],
  receivedRecords: readonly KvRecord[],
): KvComparison {
  const of = (records: readonly KvRecord[]) =>
    records.findLast((record) => record.request_id.startsWith(`cmpl-${requestId}-`));
  const sent = of(sentRecords);
  const received = of(receivedRecords);
  const transfers = [received?.transfer, sent?.transfer];
  const transfer = transfers.find((each) => (each?.length_bytes ?? 0) > 0);
  const difference = differenceOf(sent, received);
  return { sent, received, transfer, equal: difference === undefined, difference };
}

function differenceOf(
  sent: KvRecord | undefined,
  received: KvRecord | undefined,
): string | undefined {
  if (sent === undefined) return "no prefill instance recorded its KV";
  if (received === undefined) return "no decode instance recorded its KV";
  if (sent.digests.length === 0 || received.digests.length !== sent.digests.length)
    return `the sender has ${sent.digests.length} digests and the receiver ${received.digests.length}`;
  // The tokens in the receiver's prefix cache come from an earlier request.
  const first = Math.ceil(received.cached_tokens / received.digest_tokens);
  const differing = sent.digests.findIndex(
    (digest, i) => i >= first && digest !== received.digests[i],
  );
  if (differing < 0) return undefined;
  return `from token ${differing * sent.digest_tokens} on, the received KV differs from the sent KV`;
}
