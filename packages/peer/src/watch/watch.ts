import { type MemoryMetrics, memoryMetrics } from "@kv/connector";
import { type Clock, KvError } from "@kv/interface";
import { judge } from "../checks/list.js";
import type { Check } from "../checks/report.js";
import { type CanaryOptions, type CanaryReference, runCanary, type WatchedPair } from "./canary.js";
import { FINDING_KINDS, findingJson } from "./findings.js";
import { ServerCounters, wideAddresses } from "./server-checks.js";

export interface WatchOptions extends CanaryOptions {
  readonly pairs: readonly WatchedPair[];
  /**
   * Undefined: the first P that answers is the reference for the others, and for itself in later
   * rounds.
   */
  readonly reference?: CanaryReference | undefined;
  readonly clock: Clock;
}

export interface WatchRound {
  /** Counted from 1. */
  readonly number: number;
  readonly findings: readonly Check[];
  /** Those of `findings` that the round before did not have. */
  readonly fresh: readonly Check[];
  readonly cost: {
    readonly durationMs: number;
    /** KV that was read at P's, in bytes. */
    readonly kvBytes: number;
    readonly prompts: number;
    readonly promptTokens: number;
    readonly outputTokens: number;
  };
}

/** Watches serving pairs, round by round. Its metrics are in Prometheus' text format. */
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
    // From the start at 0: without it, `increase()` misses the first finding.
    for (const server of this.#counters.keys())
      for (const kind of Object.keys(FINDING_KINDS))
        this.#metrics.count("kv_watch_findings_total", 0, { kind, server });
  }

  /**
   * Checks every server, then sends the canary to every pair, one after the other. Throws nothing.
   */
  async round(): Promise<WatchRound> {
    const { pairs, clock, prompt } = this.#options;
    const startedMs = clock.now();
    const findings: Check[] = [];
    const sum = { kvBytes: 0, prompts: 0, outputTokens: 0 };
    const checked = new Set<string>();
    for (const pair of pairs) {
      const reading: Check[] = [];
      for (const server of [pair.prefill, pair.decode]) {
        if (server === undefined || checked.has(server.url)) continue;
        checked.add(server.url);
        const samples = await server.metrics().catch(() => undefined);
        if (samples !== undefined)
          reading.push(...(this.#counters.get(server.url)?.compare(samples, clock.now()) ?? []));
      }
      const canary = await runCanary(pair, this.#reference, this.#options);
      this.#reference ??= canary.reference;
      if (this.#reference !== undefined) this.#reference.tokens ??= canary.reference?.tokens;
      reading.push(...canary.findings);
      const { prefill } = pair;
      const isGone = canary.findings.some(({ id }) => id === "watch.unreachable");
      const wide = isGone ? [] : await wideAddresses(prefill, canary.sideChannel);
      const watched = { url: prefill.url, reading, metadata: canary.metadata, wide };
      findings.push(...judge({ watched }));
      sum.kvBytes += canary.kvBytes;
      sum.prompts += canary.prompts;
      sum.outputTokens += canary.outputTokens;
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

  /** Prometheus' text format, version 0.0.4. */
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
 * For a single round: errors `KV_PROXY_UPSTREAM_FAILED` when a server does not answer, because then
 * the round says nothing about its pair.
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
