import type { Trail } from "./exchange.js";

/** A request as the page shows it. Times are milliseconds from the request's begin; absent where it did not come so far. */
export interface RequestRecord {
  readonly request_id: string;
  readonly endpoint: string;
  /** Of the wall clock. */
  readonly began_at: string;
  readonly outcome: string;
  readonly prefill?: string;
  readonly decode?: string;
  readonly parts?: number;
  readonly restarts?: number;
  readonly prefill_from_ms?: number;
  readonly prefill_to_ms?: number;
  /** The decode leg's begin. Until its first byte D queues, the KV comes over, and the first token is made. */
  readonly decode_from_ms?: number;
  readonly first_byte_at_ms?: number;
  readonly duration_ms: number;
}

/** The requests that ended last, and whoever wants to hear of the next. */
export interface RecentRequests {
  add(ended: EndedRequest): void;
  list(): readonly RequestRecord[];
  /** Answers what ends the subscription. */
  subscribe(listener: (record: RequestRecord) => void): () => void;
}

export function createRecentRequests(limit = 100): RecentRequests {
  const all: EndedRequest[] = [];
  const listeners = new Set<(record: RequestRecord) => void>();
  return {
    add(ended) {
      all.push(ended);
      if (all.length > limit) all.shift();
      if (listeners.size === 0) return;
      const record = requestRecord(ended);
      for (const listener of listeners) listener(record);
    },
    list: () => all.map(requestRecord),
    subscribe(listener) {
      listeners.add(listener);
      return () => void listeners.delete(listener);
    },
  };
}

export interface EndedRequest {
  readonly requestId: string | undefined;
  readonly endpoint: string;
  /** On the proxy's clock. */
  readonly startedAtMs: number;
  /** On the wall's, milliseconds since 1970. */
  readonly endedAtEpochMs: number;
  readonly durationMs: number;
  readonly outcome: string;
  readonly trail: Trail;
}

function requestRecord({
  requestId,
  endpoint,
  startedAtMs,
  endedAtEpochMs,
  durationMs,
  outcome,
  trail,
}: EndedRequest): RequestRecord {
  const since = (atMs: number | undefined) => (atMs === undefined ? undefined : atMs - startedAtMs);
  const prefillFrom = since(trail.prefillStartedAtMs);
  const decodeFrom = since(trail.decodeStartedAtMs);
  const known = {
    prefill: trail.prefill,
    decode: trail.decode,
    parts: trail.parts,
    restarts: trail.restarts,
    prefill_from_ms: prefillFrom,
    prefill_to_ms:
      prefillFrom === undefined || trail.prefillMs === undefined ? undefined : prefillFrom + trail.prefillMs,
    decode_from_ms: decodeFrom,
    first_byte_at_ms:
      decodeFrom === undefined || trail.firstByteMs === undefined
        ? undefined
        : decodeFrom + trail.firstByteMs,
  };
  return {
    request_id: requestId ?? "",
    endpoint,
    began_at: new Date(endedAtEpochMs - durationMs).toISOString(),
    outcome,
    ...Object.fromEntries(Object.entries(known).filter(([, value]) => value !== undefined)),
    duration_ms: durationMs,
  };
}
