import { statusOf } from "@kv/http";
import type { KvError } from "@kv/interface";

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
  /** Requests whose client disconnected before its answer was complete. */
  readonly aborted: number;
  /**
   * Requests that the proxy refused because of what the client sent or how much, by HTTP status
   * (below 500).
   */
  readonly refused: Readonly<Record<string, number>>;
  /** Requests that the proxy failed, by `KvError` code. */
  readonly failed: Readonly<Record<string, number>>;
}

/** Whether the client caused the failure: by what it sent, or by its disconnect. */
export function isClients(failure: KvError): boolean {
  return statusOf(failure) < 500;
}

/** Counts the requests of clients. */
export class RequestCounts {
  #inFlight = 0;
  #total = 0;
  #succeeded = 0;
  readonly #passedErrors: Record<string, number> = {};
  #aborted = 0;
  readonly #refused: Record<string, number> = {};
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

  failed(failure: KvError): void {
    this.#inFlight -= 1;
    if (!isClients(failure)) increment(this.#failed, failure.code);
    else if (failure.code === "KV_REQUEST_ABORTED") this.#aborted += 1;
    else increment(this.#refused, String(statusOf(failure)));
  }

  status(): RequestCountsStatus {
    return {
      in_flight: this.#inFlight,
      total: this.#total,
      succeeded: this.#succeeded,
      passed_errors: { ...this.#passedErrors },
      aborted: this.#aborted,
      refused: { ...this.#refused },
      failed: { ...this.#failed },
    };
  }
}

function increment(counts: Record<string, number>, key: string): void {
  counts[key] = (counts[key] ?? 0) + 1;
}
