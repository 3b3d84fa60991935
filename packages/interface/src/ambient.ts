import type { Tracer } from "./tracing.js";

/** A source of time. Long-lived parts receive one, so that tests run in virtual time. */
export interface Clock {
  /** Returns milliseconds of a monotonic clock with an arbitrary origin. */
  now(): number;
  /**
   * Calls `run` after `delayMs`, at most 2^31 - 1 (Node's limit). Only with `ref` (default: false)
   * does the timer keep the process alive.
   */
  setTimer(run: () => void, delayMs: number, options?: { ref?: boolean | undefined }): Timer;
}

/** A timer from `Clock.setTimer`. */
export interface Timer {
  /** Does nothing after the timer has fired or was cancelled. */
  cancel(): void;
}

/** A source of randomness that a seed can replay. Not for secrets. */
export interface Random {
  /** Returns a uniform number in [0, 1). */
  next(): number;
  /** Returns a new version 4 UUID (RFC 4122). */
  uuid(): string;
}

/** Fields of a log event. The adapter serialises errors. */
export type LogFields = Readonly<Record<string, unknown>>;

/**
 * Structured logging. `event` is a stable name in kebab-case; `fields` has what varies. An
 * implementation must not throw.
 */
export interface Log {
  debug(event: string, fields?: LogFields): void;
  info(event: string, fields?: LogFields): void;
  warn(event: string, fields?: LogFields): void;
  error(event: string, fields?: LogFields): void;
}

/** A sink for metrics. An implementation must not throw. */
export interface Metrics {
  /** `by` defaults to 1. */
  count(name: string, by?: number, labels?: Readonly<Record<string, string>>): void;
  /** `name` ends in the unit, such as `_seconds` or `_bytes`. */
  observe(name: string, value: number, labels?: Readonly<Record<string, string>>): void;
}

/** Time, randomness, log, metrics and traces for long-lived parts. */
export interface Ambient {
  clock: Clock;
  random: Random;
  log: Log;
  metrics: Metrics;
  /** Undefined: no spans are recorded. */
  tracer?: Tracer | undefined;
}

/** `Ambient` as options: `ambient` completes them with defaults. */
export interface AmbientOptions {
  /** @default systemClock() */
  readonly clock?: Clock | undefined;
  /** @default systemRandom() */
  readonly random?: Random | undefined;
  /** @default silentLog */
  readonly log?: Log | undefined;
  /** @default noMetrics */
  readonly metrics?: Metrics | undefined;
  readonly tracer?: Tracer | undefined;
}

/** Creates the real clock: `performance.now()` and `setTimeout`. */
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

/** Creates real randomness: `Math.random` and `crypto.randomUUID`. */
export function systemRandom(): Random {
  return { next: () => Math.random(), uuid: () => globalThis.crypto.randomUUID() };
}

/** A log that discards every event. */
export const silentLog: Log = { debug() {}, info() {}, warn() {}, error() {} };

/** A sink that discards every metric. */
export const noMetrics: Metrics = { count() {}, observe() {} };

/** Completes options with the system's clock and randomness; no log, metrics or spans. */
export function ambient(options: AmbientOptions = {}): Ambient {
  return {
    clock: options.clock ?? systemClock(),
    random: options.random ?? systemRandom(),
    log: options.log ?? silentLog,
    metrics: options.metrics ?? noMetrics,
    tracer: options.tracer,
  };
}
