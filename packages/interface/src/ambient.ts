/**
 * What every long-lived part is handed instead of reaching for globals, so that tests run in virtual time and a
 * run can be replayed from its seed.
 */
export interface Clock {
  /** Milliseconds on a monotonic clock with an arbitrary origin (as `performance.now()`). */
  now(): number;
  /** Calls `run` once after `delayMs`. The timer does not keep the process alive unless `ref` is true. */
  setTimer(run: () => void, delayMs: number, options?: { ref?: boolean | undefined }): Timer;
}

export interface Timer {
  cancel(): void;
}

/** Uniform numbers in [0, 1), and bytes for identifiers. */
export interface Random {
  next(): number;
  /** A fresh identifier, in the form of an RFC 4122 version 4 UUID. */
  uuid(): string;
}

export type LogFields = Readonly<Record<string, unknown>>;

/** Structured logging: a stable `event` name in kebab-case, then fields. `pino` and `console` adapters are one line. */
export interface Log {
  debug(event: string, fields?: LogFields): void;
  info(event: string, fields?: LogFields): void;
  warn(event: string, fields?: LogFields): void;
  error(event: string, fields?: LogFields): void;
}

/** Where counters and histograms go; a Prometheus or OpenTelemetry adapter implements these two. */
export interface Metrics {
  count(name: string, by?: number, labels?: Readonly<Record<string, string>>): void;
  observe(name: string, value: number, labels?: Readonly<Record<string, string>>): void;
}

export interface Ambient {
  clock: Clock;
  random: Random;
  log: Log;
  metrics: Metrics;
}

/** `Ambient` as an argument: a part that is absent or undefined gets the default that `ambient` names. */
export interface AmbientOptions {
  readonly clock?: Clock | undefined;
  readonly random?: Random | undefined;
  readonly log?: Log | undefined;
  readonly metrics?: Metrics | undefined;
}

/** The real clock: `performance.now()` and Node or browser timers. */
export function systemClock(): Clock {
  return {
    now: () => performance.now(),
    setTimer(run, delayMs, options) {
      const timer: unknown = setTimeout(run, delayMs);
      if (options?.ref !== true && typeof timer === "object" && timer !== null && "unref" in timer) {
        (timer as { unref(): void }).unref();
      }
      return { cancel: () => clearTimeout(timer as ReturnType<typeof setTimeout>) };
    },
  };
}

export function systemRandom(): Random {
  return { next: () => Math.random(), uuid: () => globalThis.crypto.randomUUID() };
}

export const silentLog: Log = { debug() {}, info() {}, warn() {}, error() {} };

export const noMetrics: Metrics = { count() {}, observe() {} };

/** Fills what the caller left out: the system's clock and randomness, no log, no metrics. */
export function ambient(given: AmbientOptions = {}): Ambient {
  return {
    clock: given.clock ?? systemClock(),
    random: given.random ?? systemRandom(),
    log: given.log ?? silentLog,
    metrics: given.metrics ?? noMetrics,
  };
}
