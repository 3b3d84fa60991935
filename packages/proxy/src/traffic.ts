/** Counts of requests since the start, for `/status`. */
export interface TrafficStatus {
  readonly in_flight: number;
  readonly total: number;
  /** Answered with a status below 400, to the last byte. */
  readonly succeeded: number;
  /** Answered with an instance's own error, by its status. */
  readonly passed_errors: Readonly<Record<string, number>>;
  /** Failed at the proxy, by `KvError` code; a client that went away is `KV_REQUEST_ABORTED`. */
  readonly failed: Readonly<Record<string, number>>;
}

export interface Traffic {
  begin(): void;
  answered(status: number): void;
  failed(code: string): void;
  inFlight(): number;
  status(): TrafficStatus;
}

export function createTraffic(): Traffic {
  let inFlight = 0;
  let total = 0;
  let succeeded = 0;
  const passedErrors: Record<string, number> = {};
  const failed: Record<string, number> = {};
  const count = (counts: Record<string, number>, key: string) => (counts[key] = (counts[key] ?? 0) + 1);
  return {
    begin() {
      inFlight++;
      total++;
    },
    answered(status) {
      inFlight--;
      if (status < 400) succeeded++;
      else count(passedErrors, String(status));
    },
    failed(code) {
      inFlight--;
      count(failed, code);
    },
    inFlight: () => inFlight,
    status: () => ({
      in_flight: inFlight,
      total,
      succeeded,
      passed_errors: { ...passedErrors },
      failed: { ...failed },
    }),
  };
}
