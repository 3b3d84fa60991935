/** Counts of requests since the start, as JSON for `/status`. */
export interface RequestCountsStatus {
  /** Requests that have begun and not ended. */
  readonly in_flight: number;
  /** Requests that began. */
  readonly total: number;
  /** Requests that were answered to the last byte with a status below 400. */
  readonly succeeded: number;
  /** Requests that were answered with an instance's error, by HTTP status. */
  readonly passed_errors: Readonly<Record<string, number>>;
  /** Requests that the proxy failed, by `KvError` code. A client that disconnected is `KV_REQUEST_ABORTED`. */
  readonly failed: Readonly<Record<string, number>>;
}

/** Counts the requests of clients. */
export class RequestCounts {
  #inFlight = 0;
  #total = 0;
  #succeeded = 0;
  readonly #passedErrors: Record<string, number> = {};
  readonly #failed: Record<string, number> = {};

  /** A request begins; `answered` or `failed` ends it. */
  began(): void {
    this.#inFlight += 1;
    this.#total += 1;
  }

  answered(status: number): void {
    this.#inFlight -= 1;
    if (status < 400) this.#succeeded += 1;
    else increment(this.#passedErrors, String(status));
  }

  failed(code: string): void {
    this.#inFlight -= 1;
    increment(this.#failed, code);
  }

  status(): RequestCountsStatus {
    return {
      in_flight: this.#inFlight,
      total: this.#total,
      succeeded: this.#succeeded,
      passed_errors: { ...this.#passedErrors },
      failed: { ...this.#failed },
    };
  }
}

function increment(counts: Record<string, number>, key: string): void {
  counts[key] = (counts[key] ?? 0) + 1;
}
