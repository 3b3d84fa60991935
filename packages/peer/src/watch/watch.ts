import { type MemoryMetrics, memoryMetrics } from "@kv/connector";
import { type Clock, KvError } from "@kv/interface";
import type { AgentMetadata } from "@kv/protocol";
import type { Check } from "../checks/report.js";
import type { Reach } from "../headless/headless-engine.js";
import { type PrefilledPrompt, prefillPrompt } from "../headless/matching-decode.js";
import type { EngineServer } from "../http/engine-server.js";
import {
  readRankMetadata,
  type SideChannelAddress,
  sideChannelOf,
} from "../protocol/remote-engine.js";
import { compareKv, type DiffOptions, filledParts } from "../recording/diff.js";
import { decodeAfter, receiveKv, release } from "../recording/record.js";
import {
  FINDING_KINDS,
  finding,
  findingJson,
  ServerCounters,
  sharedAddresses,
  wideAddresses,
} from "./findings.js";

export interface WatchedPair {
  readonly prefill: EngineServer;
  readonly decode: EngineServer | undefined;
}

export interface CanaryReference {
  readonly from: string;
  readonly kv: Uint8Array;
  /** Undefined until a D has generated. */
  tokens: readonly number[] | undefined;
}

interface CanaryOptions extends DiffOptions, Reach {
  readonly prompt: readonly number[];
  readonly outputTokens: number;
}

/** What the canary of one pair has found, and how far it came. */
interface CanaryRun {
  readonly findings: Check[];
  prompts: number;
  sideChannel?: SideChannelAddress;
  metadata?: AgentMetadata;
  kv?: Uint8Array;
  tokens?: readonly number[];
}

/**
 * Compares the canary prompt's KV with the reference; D continues from it. A failure is a finding.
 */
async function runCanary(
  { prefill, decode }: WatchedPair,
  reference: CanaryReference | undefined,
  options: CanaryOptions,
): Promise<CanaryRun> {
  const run: CanaryRun = { findings: [], prompts: 0 };
  let at = prefill;
  try {
    const prompt = await prefillPrompt(prefill, options.prompt);
    run.prompts += 1;
    const { remote } = prompt;
    run.sideChannel = sideChannelOf(remote);
    // Without an answer nobody can free the blocks before their lease ends.
    const { metadata } = await readRankMetadata(options.sideChannel, run.sideChannel);
    run.metadata = metadata;
    run.kv = await receiveKv(prompt, { ...options, isReadAgain: decode !== undefined });
    try {
      run.findings.push(...compareCanary(prefill, reference, run.kv, prompt, metadata, options));
    } catch (error) {
      if (decode !== undefined) await release(prompt, options);
      throw error;
    }
    if (decode === undefined) return run;
    at = decode;
    // For a second receiver, P computes the prompt again.
    if (remote.transferMode === "push") run.prompts += 1;
    const made = await decodeAfter(prompt, { prefill, decode }, options.outputTokens, options);
    run.tokens = made;
    const wanted = reference?.tokens ?? made;
    const differs = wanted.findIndex((token, index) => token !== made[index]);
    if (differs >= 0) {
      const found = `token ${differs} of the canary is ${made[differs]} and not ${wanted[differs]} as at ${reference?.from}`;
      run.findings.push(finding("tokens-differ", decode.url, found));
    }
  } catch (thrown) {
    const { code, message } = KvError.from(thrown, "KV_INTERNAL", "the canary failed");
    const isGone = code === "KV_PROXY_UPSTREAM_FAILED" && !/ answered \d+/.test(message);
    const kind = isGone || code.startsWith("KV_SIDE_CHANNEL") ? "unreachable" : "canary-failed";
    run.findings.push(finding(kind, at.url, `${message} [${code}]`));
  }
  return run;
}

function compareCanary(
  prefill: EngineServer,
  reference: CanaryReference | undefined,
  kv: Uint8Array,
  prompt: PrefilledPrompt,
  metadata: AgentMetadata,
  options: CanaryOptions,
): Check[] {
  if (reference === undefined) return [];
  const ranks = Array.from({ length: prompt.remote.tpSize }, (_, tpRank) => ({ tpRank, metadata }));
  const parts = filledParts(ranks, prompt, options.groups);
  const different = compareKv(reference.kv, kv, parts, options);
  const [first] = different;
  if (first === undefined) return [];
  const found = `the KV of the canary differs from that of ${reference.from} in ${different.length} of ${parts.length} regions, first in ${first.where}: ${first.one} | ${first.other}`;
  return [finding("kv-differs", prefill.url, found)];
}

interface WatchOptions extends CanaryOptions {
  readonly pairs: readonly WatchedPair[];
  readonly reference?: CanaryReference | undefined;
  readonly clock: Clock;
}

export interface WatchRound {
  readonly number: number;
  readonly findings: readonly Check[];
  readonly fresh: readonly Check[];
  readonly cost: {
    readonly durationMs: number;
    readonly kvBytes: number;
    readonly prompts: number;
    readonly promptTokens: number;
    readonly outputTokens: number;
  };
}

export class Watch {
  readonly #options: WatchOptions;
  readonly #counters: ReadonlyMap<string, ServerCounters>;
  readonly #metrics: MemoryMetrics = memoryMetrics();
  #reference: CanaryReference | undefined;
  #number = 0;
  #before = new Set<string>();

  constructor(options: WatchOptions) {
    this.#options = options;
    this.#reference = options.reference;
    const urls = options.pairs.flatMap(({ prefill, decode }) => [
      prefill.url,
      ...(decode ? [decode.url] : []),
    ]);
    this.#counters = new Map(urls.map((url) => [url, new ServerCounters(url)]));
    // Without a first sample of 0, `increase()` misses the first finding.
    for (const server of this.#counters.keys())
      for (const kind of Object.keys(FINDING_KINDS))
        this.#metrics.count("kv_watch_findings_total", 0, { kind, server });
  }

  /** Servers first, then each pair's canary. */
  async round(): Promise<WatchRound> {
    const { pairs, clock, prompt } = this.#options;
    const startedMs = clock.now();
    const findings: Check[] = [];
    const sum = { kvBytes: 0, prompts: 0, outputTokens: 0 };
    const checked = new Set<string>();
    for (const pair of pairs) {
      const { prefill } = pair;
      for (const server of [prefill, pair.decode]) {
        if (server === undefined || checked.has(server.url)) continue;
        checked.add(server.url);
        const samples = await server.metrics().catch(() => undefined);
        if (samples !== undefined)
          findings.push(...(this.#counters.get(server.url)?.compare(samples, clock.now()) ?? []));
      }
      const { kv, tokens, ...canary } = await runCanary(pair, this.#reference, this.#options);
      this.#reference ??= kv && { from: prefill.url, kv, tokens };
      if (this.#reference !== undefined) this.#reference.tokens ??= tokens;
      findings.push(...canary.findings);
      if (canary.metadata !== undefined)
        findings.push(...sharedAddresses(prefill.url, canary.metadata));
      if (!canary.findings.some(({ id }) => id === "watch.unreachable"))
        for (const wide of await wideAddresses(prefill, canary.sideChannel))
          findings.push(finding("wide-address", prefill.url, wide));
      sum.kvBytes += kv?.byteLength ?? 0;
      sum.prompts += canary.prompts;
      sum.outputTokens += tokens?.length ?? 0;
    }
    this.#number += 1;
    const keyOf = ({ id, details }: Check) => `${id} ${details?.server}`;
    const fresh = findings.filter((finding) => !this.#before.has(keyOf(finding)));
    this.#before = new Set(findings.map(keyOf));
    const cost = {
      ...sum,
      promptTokens: sum.prompts * prompt.length,
      durationMs: clock.now() - startedMs,
    };
    this.#count(findings, cost);
    return { number: this.#number, findings, fresh, cost };
  }

  metrics(): string {
    return this.#metrics.render();
  }

  #count(findings: readonly Check[], cost: WatchRound["cost"]): void {
    const metrics = this.#metrics;
    for (const { kind, server } of findings.map(findingJson))
      metrics.count("kv_watch_findings_total", 1, { kind, server });
    metrics.count("kv_watch_rounds_total");
    metrics.observe("kv_watch_round_duration_seconds", cost.durationMs / 1000);
    metrics.count("kv_watch_kv_read_bytes_total", cost.kvBytes);
    metrics.count("kv_watch_prompt_tokens_total", cost.promptTokens);
    metrics.count("kv_watch_output_tokens_total", cost.outputTokens);
  }
}

/**
 * @throws `KV_PROXY_UPSTREAM_FAILED` when a server does not answer: the round says nothing then.
 */
export function requireAnswers({ findings }: WatchRound): void {
  const gone = findings.map(findingJson).filter(({ kind }) => kind === "unreachable");
  if (gone.length === 0) return;
  throw new KvError(
    "KV_PROXY_UPSTREAM_FAILED",
    `${gone.length} of the servers do not answer: ${gone.map(({ server, found }) => `${server} (${found})`).join(", ")}`,
    { hint: FINDING_KINDS.unreachable.remedy },
  );
}
