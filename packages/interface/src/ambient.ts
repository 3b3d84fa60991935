import type { Tracer } from "./tracing.js";

/**
 * A source of time. Long-lived parts receive it as an option instead of reading globals, so that
 * tests run in virtual time. `systemClock` is the real one.
 */
export interface Clock {
  /**
   * Returns milliseconds on a monotonic clock with an arbitrary origin, as `performance.now()`
   * does.
   */
  now(): number;
  /**
   * Calls `run` once after `delayMs` milliseconds. The timer keeps the process alive only when
   * `ref` is true (default: false). `delayMs` is at most 2^31 - 1, the limit of Node's timers.
   */
  setTimer(run: () => void, delayMs: number, options?: { ref?: boolean | undefined }): Timer;
}

/** A timer that was set with `Clock.setTimer`. */
export interface Timer {
  /** Cancels the timer. No effect after it has fired or was cancelled. */
  cancel(): void;
}

/** A source of randomness, so that a run can be replayed from a seed. It is not for secrets. */
export interface Random {
  /** Returns a uniform number in [0, 1). */
  next(): number;
  /** Returns a new identifier in the form of a version 4 UUID (RFC 4122). */
  uuid(): string;
}

/** Fields of a log event. Values may be errors; the adapter serialises them. */
export type LogFields = Readonly<Record<string, unknown>>;

/**
 * Structured logging. `event` is a stable name in kebab-case; everything that varies is in
 * `fields`. An implementation must not throw.
 */
export interface Log {
  /** Logs details for the diagnosis of one request. */
  debug(event: string, fields?: LogFields): void;
  /** Logs a normal event of the process. */
  info(event: string, fields?: LogFields): void;
  /** Logs an event that degrades the service. */
  warn(event: string, fields?: LogFields): void;
  /** Logs a failure that needs attention. */
  error(event: string, fields?: LogFields): void;
}

/**
 * A sink for metrics, such as an adapter for Prometheus or OpenTelemetry. An implementation must
 * not throw.
 */
export interface Metrics {
  /** Adds `by` (default: 1) to the counter `name`. */
  count(name: string, by?: number, labels?: Readonly<Record<string, string>>): void;
  /**
   * Records `value` in the histogram `name`. The unit is part of the name, such as `_seconds` or
   * `_bytes`.
   */
  observe(name: string, value: number, labels?: Readonly<Record<string, string>>): void;
}

/** Time, randomness, log, metrics and traces: what every long-lived part receives. */
export interface Ambient {
  clock: Clock;
  random: Random;
  log: Log;
  metrics: Metrics;
  /** Records spans. Undefined: no spans are recorded. */
  tracer?: Tracer | undefined;
}

/** `Ambient` as options. `ambient` replaces absent and undefined members with defaults. */
export interface AmbientOptions {
  /** Source of time. @default systemClock() */
  readonly clock?: Clock | undefined;
  /** Source of randomness. @default systemRandom() */
  readonly random?: Random | undefined;
  /** Sink for log events. @default silentLog */
  readonly log?: Log | undefined;
  /** Sink for metrics. @default noMetrics */
  readonly metrics?: Metrics | undefined;
  /** Records spans. */
  readonly tracer?: Tracer | undefined;
}

/** Creates the real clock: `performance.now()`, and the timers of Node or the browser. */
export function systemClock(): Clock {
  return {
    now: () => performance.now(),
    setTimer(run, delayMs, options) {
      const timer: unknown = setTimeout(run, delayMs);
      if (
        options?.ref !== true &&
        typeof timer === "object" &&
        timer !== null &&
        "unref" in timer
      ) {
        (timer as { unref(): void }).unref();
      }
      return { cancel: () => clearTimeout(timer as ReturnType<typeof setTimeout>) };
    },
  };
}

/**
 * Creates the real source of randomness: `Math.random`, and `crypto.randomUUID` for identifiers.
 */
export function systemRandom(): Random {
  return { next: () => Math.random(), uuid: () => globalThis.crypto.randomUUID() };
}

/** A log that discards every event. */
export const silentLog: Log = { debug() {}, info() {}, warn() {}, error() {} };

/** A metrics sink that discards every value. */
export const noMetrics: Metrics = { count() {}, observe() {} };

/** Completes options with the system's clock and randomness, no log, no metrics and no spans. */
export function ambient(options: AmbientOptions = {}): Ambient {
  return {
    clock: options.clock ?? systemClock(),
    random: options.random ?? systemRandom(),
    log: options.log ?? silentLog,
    metrics: options.metrics ?? noMetrics,
    tracer: options.tracer,
  };
}
