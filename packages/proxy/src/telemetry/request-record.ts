import type { DisaggregationInputs, DisaggregationReason } from "@kv/fleet";
import { statusName } from "@kv/fleet/front-end";
import { statusOf } from "@kv/http";
import type { Clock, KvError } from "@kv/interface";

export interface Disaggregation {
  readonly inputs: DisaggregationInputs;
  readonly reason: DisaggregationReason;
}

/**
 * Facts for the access log, metrics, status page and the limit of abandoned work. Times are ms on
 * the proxy's clock. Members are undefined where the request did not get that far.
 */
export class RequestRecord {
  /** Undefined for a request that was refused before it had an id. */
  requestId: string | undefined;
  /** The route as metrics and logs name it. */
  readonly endpoint: string;
  readonly startedAtMs: number;
  /** HTTP status, or `KvError` code of a failure; `running` before the end. */
  outcome = "running";
  prefill: string | undefined;
  decode: string | undefined;
  prefillStartedAtMs: number | undefined;
  prefillMs: number | undefined;
  /** In ms. Where an instance computes several requests at once, this request's share. */
  prefillWorkMs = 0;
  decodeStartedAtMs: number | undefined;
  /** From the decode leg's start to its answer's first byte. */
  firstByteMs: number | undefined;
  /** False where the first byte comes with the last token. */
  streamed: boolean | undefined;
  /** Prompt tokens expected in P's cache; undefined where the routing does not know. */
  expectedCachedTokens: number | undefined;
  /** Prompt tokens that P did not compute, by its answer, else those of the ended turn it read. */
  cachedTokens: number | undefined;
  /** `host:port` of the P2P tier that P was to fetch the prompt's start from. */
  kvSource: string | undefined;
  /** Tokens of the prompt's start that it has. */
  kvSourceTokens: number | undefined;
  /** Bytes of the answer's body that left for the client. */
  answerLengthBytes: number | undefined;
  status: number | undefined;
  /** Undefined for a request that was not split. */
  parts: number | undefined;
  restarts: number | undefined;
  /** Set where a rule chose one leg or two. */
  disaggregation: Disaggregation | undefined;
  /** Blocks were released because no D would read them. */
  released: boolean | undefined;
  /**
   * `used`, `lost` where a request with a turn began again, or why no turn was used. Undefined
   * where the setting is off.
   */
  readback: string | undefined;
  /** Tokens of an ended turn that P did not compute. */
  readbackTokens: number | undefined;
  /** Undefined while the request runs. */
  durationMs: number | undefined;

  constructor(endpoint = "", startedAtMs = 0) {
    this.endpoint = endpoint;
    this.startedAtMs = startedAtMs;
  }

  restarted(): void {
    this.restarts = (this.restarts ?? 0) + 1;
    this.decodeStartedAtMs = undefined;
    this.cachedTokens = undefined;
    this.readbackTokens = undefined;
    if (this.readback === "used") this.readback = "lost";
  }

  logFields(): Readonly<Record<string, unknown>> {
    const {
      requestId,
      endpoint,
      disaggregation,
      startedAtMs,
      prefillStartedAtMs,
      prefillWorkMs,
      decodeStartedAtMs,
      streamed,
      outcome,
      ...fields
    } = this;
    return { requestId, endpoint, disaggregation: disaggregation?.reason, ...fields };
  }
}

/** Counts of requests since the start, for `/status`. */
export interface RequestCountsStatus {
  readonly in_flight: number;
  readonly total: number;
  /** Requests answered to the last byte with a status below 400. */
  readonly succeeded: number;
  /** Requests answered with an instance's error, by HTTP status. */
  readonly passed_errors: Readonly<Record<string, number>>;
  /** Requests whose client disconnected before the answer was complete. */
  readonly aborted: number;
  /** Requests refused for what the client sent or how much, by HTTP status below 500. */
  readonly refused: Readonly<Record<string, number>>;
  /** Requests that the proxy failed, by `KvError` code. */
  readonly failed: Readonly<Record<string, number>>;
}

type Counts = Record<string, number>;

export class RequestCounts {
  readonly #counts = {
    in_flight: 0,
    total: 0,
    succeeded: 0,
    passed_errors: {} as Counts,
    aborted: 0,
    refused: {} as Counts,
    failed: {} as Counts,
  };

  began(): void {
    this.#counts.in_flight += 1;
    this.#counts.total += 1;
  }

  ended(status: number, failure: KvError | undefined): void {
    const counts = this.#counts;
    counts.in_flight -= 1;
    if (failure === undefined && status < 400) counts.succeeded += 1;
    else if (failure === undefined) increment(counts.passed_errors, statusName(status));
    else if (statusOf(failure) >= 500) increment(counts.failed, failure.code);
    else if (failure.code === "KV_REQUEST_ABORTED") counts.aborted += 1;
    else increment(counts.refused, String(statusOf(failure)));
  }

  status(): RequestCountsStatus {
    return structuredClone(this.#counts);
  }
}

function increment(counts: Counts, key: string): void {
  counts[key] = (counts[key] ?? 0) + 1;
}

/**
 * A request for the status page. Times are ms from its start. Members are absent where it did not
 * get that far.
 */
export interface RequestSummary extends Readonly<Record<string, unknown>> {
  /** Wall-clock time, ISO 8601. */
  readonly began_at: string;
  readonly duration_ms: number;
}

/** The most ended requests that are kept. */
export const MOST_ENDED = 100;
const MOST_RUNNING = 50;

export class RequestHistory {
  /** Wall-clock ms since 1970 at zero of the proxy's clock. */
  readonly #epochMs: number;
  readonly #running = new Set<RequestRecord>();
  readonly #ended: RequestRecord[] = [];
  readonly #listeners = new Set<(summary: RequestSummary) => void>();

  /** Reads the wall clock once; later times are those of `clock`. */
  constructor(private readonly clock: Clock) {
    this.#epochMs = Date.now() - clock.now();
  }

  /** A request runs until `add` gets its record. */
  begin(record: RequestRecord): void {
    this.#running.add(record);
  }

  add(ended: RequestRecord): void {
    this.#running.delete(ended);
    this.#ended.push(ended);
    if (this.#ended.length > MOST_ENDED) this.#ended.shift();
    if (this.#listeners.size === 0) return;
    const summary = this.#summary(ended);
    for (const listener of this.#listeners) listener(summary);
  }

  /** The 50 longest-running requests, oldest first. */
  running(): readonly RequestSummary[] {
    return Array.from(this.#running).slice(0, MOST_RUNNING).map(this.#summary);
  }

  list(): readonly RequestSummary[] {
    return this.#ended.map(this.#summary);
  }

  /** Calls `listener` for each ended request. Returns the function that unsubscribes it. */
  subscribe(listener: (summary: RequestSummary) => void): () => void {
    this.#listeners.add(listener);
    return () => void this.#listeners.delete(listener);
  }

  readonly #summary = (record: RequestRecord): RequestSummary => {
    const { startedAtMs, kvSource } = record;
    const sum = (one: number | undefined, other: number | undefined) =>
      one === undefined || other === undefined ? undefined : one + other;
    const prefillFrom = sum(record.prefillStartedAtMs, -startedAtMs);
    /** Until a streamed answer's first byte, D queues, gets the KV and generates a token. */
    const decodeFrom = sum(record.decodeStartedAtMs, -startedAtMs);
    const known = {
      prefill: record.prefill,
      decode: record.decode,
      parts: record.parts,
      restarts: record.restarts,
      prefill_from_ms: prefillFrom,
      prefill_to_ms: sum(prefillFrom, record.prefillMs),
      decode_from_ms: decodeFrom,
      first_byte_at_ms: sum(decodeFrom, record.firstByteMs),
      streamed: record.streamed,
      readback: record.readback,
      readback_tokens: record.readbackTokens,
      kv_source: kvSource,
      kv_source_tokens: record.kvSourceTokens,
      own_cached_tokens: kvSource === undefined ? undefined : record.expectedCachedTokens,
    };
    return {
      request_id: record.requestId ?? "",
      endpoint: record.endpoint,
      began_at: new Date(this.#epochMs + startedAtMs).toISOString(),
      outcome: record.outcome,
      ...Object.fromEntries(Object.entries(known).filter(([, value]) => value !== undefined)),
      duration_ms: record.durationMs ?? this.clock.now() - startedAtMs,
    };
  };
}
