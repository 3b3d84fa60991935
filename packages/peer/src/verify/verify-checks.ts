import type { KvError } from "@kv/interface";
import { type Check, check, type Role } from "../checks/report.js";
import type { Answer } from "../http/engine-server.js";
import type { LeakReport } from "../load/block-leaks.js";
import { type EngineCounters, promptTokens } from "./counters.js";

export interface SentPrompt {
  readonly length: number;
  /** Undefined when it failed. */
  readonly answer: Answer | undefined;
  /** Undefined when it was answered. */
  readonly failure: KvError | undefined;
  /** The same prompt at one engine; undefined when that failed. */
  readonly expected: Answer | undefined;
  readonly counted: Readonly<Record<Role, EngineCounters>>;
}

export interface HeldBlocks {
  readonly role: Role;
  readonly url: string;
  /** Undefined when /metrics do not show its blocks. */
  readonly leaks: LeakReport | undefined;
  /** Requests that ran or waited at the end: their blocks are no leak. */
  readonly running: number;
}

export interface SeenDeployment {
  readonly prompts: readonly SentPrompt[];
  /** From before the first prompt until after the last. */
  readonly totals: Readonly<Record<Role, EngineCounters>>;
  readonly withoutConnector: readonly string[];
  readonly blocks: readonly HeldBlocks[];
  /** The URL of the engine whose answers are right. */
  readonly reference: string;
}

const prompts = (count: number) => `${count} ${count === 1 ? "prompt" : "prompts"}`;
const tokens = (count: number) => count.toLocaleString("en-US");

interface Seen {
  readonly deployment: SeenDeployment;
}

export function requestChecks({ deployment: { prompts: sent } }: Seen): Check[] {
  const failed = sent.flatMap(({ failure }) => failure ?? []);
  const [first] = failed;
  if (first === undefined) {
    const found = `${prompts(sent.length)} of ${tokens(sent[0]?.length ?? 0)} tokens, with status 200`;
    return [check("requests.answered", "answered", "ok", found)];
  }
  const found = `${failed.length} of ${prompts(sent.length)}; the first: ${first.message}`;
  const fix =
    "the logs of the front end and of both servers have the cause; kv-peer doctor checks the pair";
  return [check("requests.failed", "requests failed", "fail", found, { fix })];
}

/**
 * How a prompt that was answered was served. `unclear`: D counted other prompts at the same time.
 * `elsewhere`: no D that was given counted it.
 */
type ServedHow = "moved" | "recomputed" | "unclear" | "elsewhere";

/**
 * How a prompt was served, by what both sides counted meanwhile. A transfer counts, and not D's
 * word that it has loaded.
 */
function servedHow({ length, counted: { prefill, decode } }: SentPrompt): ServedHow {
  const atDecode = promptTokens(decode);
  if (atDecode > length) return "unclear";
  if (decode.bytes + prefill.bytes > 0) return "moved";
  return atDecode === 0 ? "elsewhere" : "recomputed";
}

/** Whether KV moved, in which direction and for how many of the prompts, or D computed them. */
export function transferChecks({ deployment: seen }: Seen): Check[] {
  const answered = seen.prompts.filter(({ answer }) => answer !== undefined);
  if (answered.length === 0) return [];
  const { prefill, decode } = seen.totals;
  const of = (how: ServedHow) => answered.filter((prompt) => servedHow(prompt) === how);
  const [moved, recomputed, unclear, elsewhere] = [
    of("moved"),
    of("recomputed"),
    of("unclear"),
    of("elsewhere"),
  ];
  const checks: Check[] = [];
  const share = (list: readonly SentPrompt[]) => `${list.length} of ${prompts(answered.length)}`;

  if (moved.length > 0) {
    const [d, p] = [decode.transfers > 0, prefill.transfers > 0];
    const how = d && p ? "by READ and WRITE" : d ? "READ by D" : "WRITTEN by P";
    const [bytes, transfers] = [
      decode.bytes + prefill.bytes,
      decode.transfers + prefill.transfers,
    ].map(tokens);
    const found = `${share(moved)}: ${bytes} bytes in ${transfers} transfers, ${how}; D computed ${tokens(decode.computedTokens)} of ${tokens(promptTokens(decode))} prompt tokens`;
    checks.push(check("transfer.moved", "KV moved", "ok", found));
    const again = moved.filter(({ length, counted }) => counted.decode.computedTokens > length / 2);
    if (again.length > 0)
      checks.push(
        check(
          "transfer.computed-again",
          "computed again",
          "fail",
          `${share(again)}: KV moved, and D computed the prompt as well`,
          {
            fix: "compare the block sizes and the prefix caching of both servers; look for failed loads in D's log",
          },
        ),
      );
  }
  if (recomputed.length > 0) {
    const computed = sumOf(recomputed, ({ counted }) => counted.decode.computedTokens);
    const all = sumOf(recomputed, ({ length }) => length);
    // A load that failed is computed without being counted as such.
    const claimed =
      computed < all ? "; the rest it counts as loaded, though nothing was transferred" : "";
    checks.push(
      check(
        "transfer.recomputed",
        "D recomputes",
        "fail",
        `${share(recomputed)}: no KV moved; D computed ${tokens(computed)} of ${tokens(all)} prompt tokens itself${claimed} (kserve/kserve#5987)`,
        { fix: whyRecomputed(seen) },
      ),
    );
  }
  if (elsewhere.length > 0)
    checks.push(
      check(
        "transfer.elsewhere",
        "not at D",
        "fail",
        `${share(elsewhere)}: no decode server that was given counted them`,
        {
          fix: "give every decode server behind this front end with --decode; does it send requests to the prefill servers alone?",
        },
      ),
    );
  if (unclear.length > 0)
    checks.push(
      check(
        "transfer.unclear",
        "other requests",
        moved.length > 0 ? "warn" : "fail",
        `${share(unclear)}: D counted other requests at the same time, so that what moved for these is not known`,
        { fix: "verify while no other client uses the deployment" },
      ),
    );
  if (decode.failedTransfers + prefill.failedTransfers > 0)
    checks.push(
      check(
        "transfer.failed",
        "failed transfers",
        "fail",
        `${decode.failedTransfers} at D and ${prefill.failedTransfers} at P, handshakes and notifications included`,
        {
          fix: "kv-peer doctor with this pair names the cause; the servers' logs have a line for each",
        },
      ),
    );
  if (seen.withoutConnector.length > 0 && recomputed.length === 0) {
    const found = `${seen.withoutConnector.join(", ")} has no NIXL metrics`;
    checks.push(check("transfer.no-connector", "connector", "note", found));
  }
  return checks;
}

const sumOf = (list: readonly SentPrompt[], of: (prompt: SentPrompt) => number) =>
  list.reduce((sum, prompt) => sum + of(prompt), 0);

/** The likeliest reason for which D computes, from the outside inwards. */
function whyRecomputed({ withoutConnector, totals: { prefill, decode } }: SeenDeployment): string {
  const [first] = withoutConnector;
  if (first !== undefined)
    return `${withoutConnector.join(" and ")} ${withoutConnector.length === 1 ? "has" : "have"} no NIXL metrics: no KV connector runs there; start it with --kv-transfer-config`;
  if (promptTokens(prefill) === 0)
    return "no prefill server that was given counted a prompt: look at how the front end decides between P and D";
  if (decode.failedTransfers + prefill.failedTransfers > 0)
    return "transfers or handshakes failed, and D's kv_load_failure_policy is recompute: kv-peer doctor with this pair names the cause";
  return "P computed the prompts and no transfer was tried: the front end does not ask P for kv_transfer_params, or does not hand them to D";
}

const FREE_FIX: Readonly<Record<Role, string>> = {
  prefill:
    "each request that P computes must end at one D: look for a front end that retries or drops the decode leg; until then the blocks stay for a lease",
  decode: "look for aborted requests in D's log; a restart frees the blocks",
};

export function blockChecks({ deployment: { blocks, totals } }: Seen): Check[] {
  const checks = blocks.map(({ role, url, leaks, running }): Check => {
    const letter = role === "prefill" ? "P" : "D";
    const freed = (status: Check["status"], found: string) =>
      check(`blocks.${role}-freed`, `blocks at ${letter}`, status, found);
    if (leaks === undefined)
      return freed("note", `not known: /metrics of ${url} do not show its blocks`);
    if (leaks.leaked === 0) {
      const seconds = ((leaks.freedMs ?? 0) / 1000).toFixed(1);
      return freed("ok", `${url} has freed them, seen after ${seconds} s`);
    }
    const found = `${url} holds ${leaks.leaked} blocks that it did not hold before`;
    if (running > 0) return freed("note", `${found}, and ${running} other requests run there`);
    return check(
      `blocks.${role}-leaked`,
      `${letter} leaks`,
      "fail",
      `${found}, though no request runs`,
      { fix: FREE_FIX[role] },
    );
  });
  const { expiredRequests, notificationsAfterExpiry } = totals.prefill;
  if (expiredRequests + notificationsAfterExpiry === 0) return checks;
  const found = `${expiredRequests} leases ended before D had read, and ${notificationsAfterExpiry} notifications came after the end of one`;
  const fix = "raise kv_lease_duration at P, or find out why D reads late";
  return [...checks, check("blocks.expired", "leases", "fail", found, { fix })];
}

export function tokenChecks({ deployment: { prompts: sent, reference } }: Seen): Check[] {
  const pairs = sent.flatMap(({ answer, expected }) =>
    answer === undefined || expected === undefined ? [] : [{ answer, expected }],
  );
  const differences = pairs.flatMap(
    ({ answer, expected }) => firstDifference(answer, expected) ?? [],
  );
  if (pairs.length === 0) {
    const found = `not known: ${reference} did not answer the same prompts`;
    return [check("tokens.equal", "tokens", "note", found)];
  }
  if (differences.length === 0) {
    const found = `${pairs.length} of ${prompts(sent.length)} have the answer of ${reference} alone`;
    return [check("tokens.equal", "tokens", "ok", found)];
  }
  return [
    check(
      "tokens.differ",
      "tokens differ",
      "fail",
      `${differences.length} of ${prompts(pairs.length)} have another answer than ${reference} alone: ${differences[0]}`,
      {
        fix: "kv-peer doctor with this pair checks the plan and the bytes; engines whose answers depend on the batch need --reference with equal settings",
      },
    ),
  ];
}

/** Token ids where both servers answer them, the text otherwise. */
function firstDifference(answer: Answer, expected: Answer): string | undefined {
  if (answer.tokens.length === 0 || expected.tokens.length === 0)
    return answer.text === expected.text
      ? undefined
      : `the text is ${JSON.stringify(answer.text.slice(0, 80))} and not ${JSON.stringify(expected.text.slice(0, 80))}`;
  const length = Math.max(answer.tokens.length, expected.tokens.length);
  for (let at = 0; at < length; at++)
    if (answer.tokens[at] !== expected.tokens[at])
      return `token ${at} is ${answer.tokens[at]} and not ${expected.tokens[at]}`;
  return undefined;
}
