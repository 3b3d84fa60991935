import { METRICS } from "@kv/connector";
import type { KvError } from "@kv/interface";
import { type Check, type CheckParts, check, ROLES, type Role } from "../checks/report.js";
import type { Answer, EngineServer } from "../http/engine-server.js";
import type { MetricSamples } from "../http/prometheus-text.js";
import type { LeakReport } from "../load/block-leaks.js";

const bySource = (source: string) => [`${METRICS.promptTokensBySource}_total`, { source }] as const;

/**
 * By vLLM's names (0.31 to 0.33). Only the engine that posts a transfer counts it: a D that READs,
 * or a P that WRITEs.
 */
const SAMPLES = {
  transfers: [`${METRICS.bytesTransferred}_count`],
  bytes: [`${METRICS.bytesTransferred}_sum`],
  transferSeconds: [`${METRICS.transferSeconds}_sum`],
  postSeconds: [`${METRICS.postSeconds}_sum`],
  descriptors: [`${METRICS.descriptors}_sum`],
  failedTransfers: [`${METRICS.failedTransfers}_total`],
  expiredRequests: [`${METRICS.expiredRequests}_total`],
  notificationsAfterExpiry: [`${METRICS.notificationsAfterExpiry}_total`],
  computedTokens: bySource("local_compute"),
  cachedTokens: bySource("local_cache_hit"),
  // vLLM counts these before it loads them, and does not correct them when the load fails.
  externalTokens: bySource("external_kv_transfer"),
} as const satisfies Readonly<Record<string, readonly [string, Readonly<Record<string, string>>?]>>;

/** Times are in seconds. A counter that a page lacks is 0. */
export type EngineCounters = Readonly<Record<keyof typeof SAMPLES, number>>;
export type Counted = Readonly<Record<Role, EngineCounters>>;

export function promptTokens({
  computedTokens,
  cachedTokens,
  externalTokens,
}: EngineCounters): number {
  return computedTokens + cachedTokens + externalTokens;
}

export function moved({ prefill, decode }: Counted) {
  return {
    transfers: decode.transfers + prefill.transfers,
    bytes: decode.bytes + prefill.bytes,
    failed: decode.failedTransfers + prefill.failedTransfers,
  };
}

export function hasNixlConnector(samples: MetricSamples): boolean {
  return samples.sum(`${METRICS.failedTransfers}_total`) !== undefined;
}

/** @throws `KV_PROXY_UPSTREAM_FAILED` when a server has no /metrics. */
export async function readCounters(
  servers: Readonly<Record<Role, readonly EngineServer[]>>,
): Promise<Counted> {
  const read = (role: Role) => Promise.all(servers[role].map((server) => server.metrics()));
  const [prefill, decode] = await Promise.all(ROLES.map(read));
  const pages = { prefill, decode };
  return counters((role, name) => {
    const [sample, labels] = SAMPLES[name];
    return (pages[role] ?? []).reduce((sum, page) => sum + (page.sum(sample, labels) ?? 0), 0);
  });
}

export function growth(before: Counted, after: Counted): Counted {
  return counters((role, name) => after[role][name] - before[role][name]);
}

function counters(of: (role: Role, name: keyof EngineCounters) => number): Counted {
  const names = Object.keys(SAMPLES) as (keyof EngineCounters)[];
  const ofRole = (role: Role) =>
    Object.fromEntries(names.map((name) => [name, of(role, name)])) as EngineCounters;
  return { prefill: ofRole("prefill"), decode: ofRole("decode") };
}

export interface SentPrompt {
  readonly prompt: readonly number[];
  readonly answer: Answer | undefined;
  readonly failure: KvError | undefined;
  /** Undefined when the reference failed. */
  expected?: Answer | undefined;
  readonly counted: Counted;
}

export interface HeldBlocks {
  readonly role: Role;
  readonly url: string;
  readonly leaks: LeakReport | undefined;
  readonly running: number;
}

export interface SeenDeployment {
  readonly prompts: readonly SentPrompt[];
  readonly totals: Counted;
  readonly withoutConnector: readonly string[];
  readonly blocks: readonly HeldBlocks[];
  readonly reference: string;
}

const prompts = (count: number) => `${count} ${count === 1 ? "prompt" : "prompts"}`;
const tokens = (count: number) => count.toLocaleString("en-US");

export function requestChecks({ prompts: sent }: SeenDeployment): Check[] {
  const failed = sent.flatMap(({ failure }) => failure ?? []);
  const [first] = failed;
  if (first === undefined) {
    const found = `${prompts(sent.length)} of ${tokens(sent[0]?.prompt.length ?? 0)} tokens, with status 200`;
    return [check("requests.answered", "answered", "ok", found)];
  }
  const found = `${failed.length} of ${prompts(sent.length)}; the first: ${first.message}`;
  const fix =
    "the logs of the front end and of both servers have the cause; kv-peer doctor checks the pair";
  return [check("requests.failed", "requests failed", "fail", found, fix)];
}

/**
 * A transfer counts, not D's word. `unclear`: D counted other prompts at the same time.
 * `elsewhere`: no given D counted it.
 */
function servedHow({ prompt, counted }: SentPrompt) {
  const atDecode = promptTokens(counted.decode);
  if (atDecode > prompt.length) return "unclear";
  if (moved(counted).bytes > 0) return "moved";
  return atDecode === 0 ? "elsewhere" : "recomputed";
}

export function transferChecks(seen: SeenDeployment): Check[] {
  const answered = seen.prompts.filter(({ answer }) => answer !== undefined);
  if (answered.length === 0) return [];
  const { prefill, decode } = seen.totals;
  const { bytes, transfers, failed } = moved(seen.totals);
  const of = (how: ReturnType<typeof servedHow>) =>
    answered.filter((prompt) => servedHow(prompt) === how);
  const checks: Check[] = [];
  const add = (id: string, ...parts: CheckParts) =>
    void checks.push(check(`transfer.${id}`, ...parts));
  const share = (list: readonly SentPrompt[]) => `${list.length} of ${prompts(answered.length)}`;

  const whole = of("moved");
  if (whole.length > 0) {
    const [d, p] = [decode.transfers > 0, prefill.transfers > 0];
    const how = d && p ? "by READ and WRITE" : d ? "READ by D" : "WRITTEN by P";
    const found = `${share(whole)}: ${tokens(bytes)} bytes in ${tokens(transfers)} transfers, ${how}; D computed ${tokens(decode.computedTokens)} of ${tokens(promptTokens(decode))} prompt tokens`;
    add("moved", "KV moved", "ok", found);
    const again = whole.filter(
      ({ prompt, counted }) => counted.decode.computedTokens > prompt.length / 2,
    );
    if (again.length > 0)
      add(
        "computed-again",
        "computed again",
        "fail",
        `${share(again)}: KV moved, and D computed the prompt as well`,
        "compare the block sizes and the prefix caching of both servers; look for failed loads in D's log",
      );
  }
  const recomputed = of("recomputed");
  if (recomputed.length > 0) {
    const computed = sumOf(recomputed, ({ counted }) => counted.decode.computedTokens);
    const all = sumOf(recomputed, ({ prompt }) => prompt.length);
    // Tokens of a failed load are computed, but not counted as such.
    const claimed =
      computed < all ? "; the rest it counts as loaded, though nothing was transferred" : "";
    add(
      "recomputed",
      "D recomputes",
      "fail",
      `${share(recomputed)}: no KV moved; D computed ${tokens(computed)} of ${tokens(all)} prompt tokens itself${claimed} (kserve/kserve#5987)`,
      whyRecomputed(seen),
    );
  }
  const elsewhere = of("elsewhere");
  if (elsewhere.length > 0)
    add(
      "elsewhere",
      "not at D",
      "fail",
      `${share(elsewhere)}: no decode server that was given counted them`,
      "give every decode server behind this front end with --decode; does it send requests to the prefill servers alone?",
    );
  const unclear = of("unclear");
  if (unclear.length > 0)
    add(
      "unclear",
      "other requests",
      whole.length > 0 ? "warn" : "fail",
      `${share(unclear)}: D counted other requests at the same time, so that what moved for these is not known`,
      "verify while no other client uses the deployment",
    );
  if (failed > 0)
    add(
      "failed",
      "failed transfers",
      "fail",
      `${decode.failedTransfers} at D and ${prefill.failedTransfers} at P, handshakes and notifications included`,
      "kv-peer doctor with this pair names the cause; the servers' logs have a line for each",
    );
  if (seen.withoutConnector.length > 0 && recomputed.length === 0)
    add(
      "no-connector",
      "connector",
      "note",
      `${seen.withoutConnector.join(", ")} has no NIXL metrics`,
    );
  return checks;
}

const sumOf = (list: readonly SentPrompt[], of: (prompt: SentPrompt) => number) =>
  list.reduce((sum, prompt) => sum + of(prompt), 0);

function whyRecomputed({ withoutConnector, totals }: SeenDeployment): string {
  if (withoutConnector.length > 0)
    return `${withoutConnector.join(" and ")} ${withoutConnector.length === 1 ? "has" : "have"} no NIXL metrics: no KV connector runs there; start it with --kv-transfer-config`;
  if (promptTokens(totals.prefill) === 0)
    return "no prefill server that was given counted a prompt: look at how the front end decides between P and D";
  if (moved(totals).failed > 0)
    return "transfers or handshakes failed, and D's kv_load_failure_policy is recompute: kv-peer doctor with this pair names the cause";
  return "P computed the prompts and no transfer was tried: the front end does not ask P for kv_transfer_params, or does not hand them to D";
}

const FREE_FIX: Readonly<Record<Role, string>> = {
  prefill:
    "each request that P computes must end at one D: look for a front end that retries or drops the decode leg; until then the blocks stay for a lease",
  decode: "look for aborted requests in D's log; a restart frees the blocks",
};

export function blockChecks({ blocks, totals }: SeenDeployment): Check[] {
  const checks = blocks.map(({ role, url, leaks, running }): Check => {
    const letter = role === "prefill" ? "P" : "D";
    const freed = (status: Check["status"], found: string) =>
      check(`blocks.${role}-freed`, `blocks at ${letter}`, status, found);
    if (leaks === undefined)
      return freed("note", `not known: /metrics of ${url} do not show its blocks`);
    const { leaked, freedMs = 0 } = leaks;
    if (leaked === 0)
      return freed("ok", `${url} has freed them, seen after ${(freedMs / 1000).toFixed(1)} s`);
    const found = `${url} holds ${leaked} blocks that it did not hold before`;
    if (running > 0) return freed("note", `${found}, and ${running} other requests run there`);
    const leak = `${found}, though no request runs`;
    return check(`blocks.${role}-leaked`, `${letter} leaks`, "fail", leak, FREE_FIX[role]);
  });
  const { expiredRequests, notificationsAfterExpiry } = totals.prefill;
  if (expiredRequests + notificationsAfterExpiry === 0) return checks;
  const found = `${expiredRequests} leases ended before D had read, and ${notificationsAfterExpiry} notifications came after the end of one`;
  const fix = "raise kv_lease_duration at P, or find out why D reads late";
  return [...checks, check("blocks.expired", "leases", "fail", found, fix)];
}

export function tokenChecks({ prompts: sent, reference }: SeenDeployment): Check[] {
  const pairs = sent.flatMap(({ answer, expected }) =>
    answer === undefined || expected === undefined ? [] : [{ answer, expected }],
  );
  const differences = pairs.flatMap((pair) => firstDifference(pair.answer, pair.expected) ?? []);
  const equal = (status: Check["status"], found: string) => [
    check("tokens.equal", "tokens", status, found),
  ];
  if (pairs.length === 0)
    return equal("note", `not known: ${reference} did not answer the same prompts`);
  const all = prompts(sent.length);
  if (differences.length === 0)
    return equal("ok", `${pairs.length} of ${all} have the answer of ${reference} alone`);
  const found = `${differences.length} of ${prompts(pairs.length)} have another answer than ${reference} alone: ${differences[0]}`;
  const fix =
    "kv-peer doctor with this pair checks the plan and the bytes; engines whose answers depend on the batch need --reference with equal settings";
  return [check("tokens.differ", "tokens differ", "fail", found, fix)];
}

/** Compares text where token ids are missing. */
function firstDifference(answer: Answer, expected: Answer): string | undefined {
  if (answer.tokens.length === 0 || expected.tokens.length === 0) {
    const shown = ({ text }: Answer) => JSON.stringify(text.slice(0, 80));
    if (answer.text === expected.text) return undefined;
    return `the text is ${shown(answer)} and not ${shown(expected)}`;
  }
  const length = Math.max(answer.tokens.length, expected.tokens.length);
  for (let at = 0; at < length; at++)
    if (answer.tokens[at] !== expected.tokens[at])
      return `token ${at} is ${answer.tokens[at]} and not ${expected.tokens[at]}`;
  return undefined;
}
