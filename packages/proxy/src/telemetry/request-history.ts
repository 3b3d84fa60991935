import type { Clock } from "@kv/interface";
import type { RequestRecord } from "./request-record.js";

/**
 * A request as JSON for the status page. Times are milliseconds from the request's begin; absent
 * where the request did not come that far.
 */
export interface RequestSummary {
  readonly request_id: string;
  readonly endpoint: string;
  /** Wall-clock time, ISO 8601. */
  readonly began_at: string;
  /**
   * HTTP status of the answer, or code of the `KvError` that the request failed with; `running`
   * before it ends.
   */
  readonly outcome: string;
  readonly prefill?: string;
  readonly decode?: string;
  readonly parts?: number;
  readonly restarts?: number;
  readonly prefill_from_ms?: number;
  readonly prefill_to_ms?: number;
  /**
   * Begin of the decode leg. From here to the first byte of a streamed answer, the request waits in
   * D's queue, the KV is transferred (without a prefill leg, the prompt is computed), and the first
   * token is generated.
   */
  readonly decode_from_ms?: number;
  readonly first_byte_at_ms?: number;
  /** False: the first byte came with the last token. */
  readonly streamed?: boolean;
  /** `used`, or why no ended turn was read; and the tokens of it. */
  readonly readback?: string;
  readonly readback_tokens?: number;
  readonly duration_ms: number;
}

/** A request that has ended. */
export interface EndedRequest {
  /** Undefined for a request that was refused before it had an id. */
  readonly requestId: string | undefined;
  readonly endpoint: string;
  /** On the proxy's clock. */
  readonly startedAtMs: number;
  readonly durationMs: number;
  readonly outcome: string;
  readonly record: RequestRecord;
}

/** The most running requests that a page shows. */
const SHOWN = 50;

/** The requests that run, and those that ended last. */
export class RequestHistory {
  readonly #clock: Clock;
  readonly #limit: number;
  /** Wall-clock time at zero of the proxy's clock, in milliseconds since 1970. */
  readonly #epochMs: number;
  readonly #running = new Map<RequestRecord, Omit<EndedRequest, "durationMs" | "outcome">>();
  readonly #ended: EndedRequest[] = [];
  readonly #listeners = new Set<(summary: RequestSummary) => void>();

  /**
   * Keeps the last `limit` requests. The wall clock is read once, here; all later times are those
   * of `clock`.
   */
  constructor(clock: Clock, limit = 100) {
    this.#clock = clock;
    this.#limit = limit;
    this.#epochMs = Date.now() - clock.now();
  }

  /** A request runs until `add` has its record. */
  begin(request: Omit<EndedRequest, "durationMs" | "outcome">): void {
    this.#running.set(request.record, request);
  }

  add(ended: EndedRequest): void {
    this.#running.delete(ended.record);
    this.#ended.push(ended);
    if (this.#ended.length > this.#limit) this.#ended.shift();
    if (this.#listeners.size === 0) return;
    const summary = this.#summary(ended);
    for (const listener of this.#listeners) listener(summary);
  }

  /**
   * The requests that have run longest, at most 50, oldest first. Their outcome is `running`, and a
   * phase without an end lasts still.
   */
  running(): readonly RequestSummary[] {
    const nowMs = this.#clock.now();
    return Array.from(this.#running.values())
      .slice(0, SHOWN)
      .map((request) =>
        this.#summary({ ...request, outcome: "running", durationMs: nowMs - request.startedAtMs }),
      );
  }

  /** The kept requests, oldest first. */
  list(): readonly RequestSummary[] {
    return this.#ended.map((ended) => this.#summary(ended));
  }

  /**
   * Calls `listener` with each request that ends. Returns a function that ends the subscription.
   */
  subscribe(listener: (summary: RequestSummary) => void): () => void {
    this.#listeners.add(listener);
    return () => void this.#listeners.delete(listener);
  }

  #summary({
    requestId,
    endpoint,
    startedAtMs,
    durationMs,
    outcome,
    record,
  }: EndedRequest): RequestSummary {
    const since = (atMs: number | undefined) =>
      atMs === undefined ? undefined : atMs - startedAtMs;
    const after = (fromMs: number | undefined, ms: number | undefined) =>
      fromMs === undefined || ms === undefined ? undefined : fromMs + ms;
    const prefillFrom = since(record.prefillStartedAtMs);
    const decodeFrom = since(record.decodeStartedAtMs);
    const known = {
      prefill: record.prefill,
      decode: record.decode,
      parts: record.parts,
      restarts: record.restarts,
      prefill_from_ms: prefillFrom,
      prefill_to_ms: after(prefillFrom, record.prefillMs),
      decode_from_ms: decodeFrom,
      first_byte_at_ms: after(decodeFrom, record.firstByteMs),
      streamed: record.streamed,
      readback: record.readback,
      readback_tokens: record.readbackTokens,
    };
    return {
      request_id: requestId ?? "",
      endpoint,
      began_at: new Date(this.#epochMs + startedAtMs).toISOString(),
      outcome,
      ...Object.fromEntries(Object.entries(known).filter(([, value]) => value !== undefined)),
      duration_ms: durationMs,
    };
  }
}
