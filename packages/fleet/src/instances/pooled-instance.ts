import type { Clock, KvError } from "@kv/interface";
import {
  failureStage,
  type Instance,
  type InstanceKv,
  type InstanceSpec,
  type InstanceStatus,
  type Role,
  type Visit,
} from "./instance.js";

/** Times, in milliseconds, for which a pool leaves instances out. */
export interface InstanceTimes {
  /**
   * How long an instance is left out after a failure; doubles with each further failure in a row.
   */
  readonly coolDownMs: number;
  readonly maxCoolDownMs: number;
  /** How long an ejected instance that is back takes a growing share of the requests. */
  readonly slowReturnMs: number;
}

/** The collaborators of a `PooledInstance`. */
export interface PooledInstanceOptions {
  readonly clock: Clock;
  readonly times: InstanceTimes;
  /**
   * Learns from visits and health checks that an engine may have been restarted.
   */
  readonly pairing?:
    | { failed(instance: Instance): void; alive(instance: Instance): void }
    | undefined;
  /**
   * Called when it takes requests that it did not take before, or takes them no more, other than by
   * the end of a time.
   */
  readonly changed?: (() => void) | undefined;
  /** Called after each change of its `inFlight`. */
  readonly loadChanged?: ((instance: PooledInstance) => void) | undefined;
}

/** An instance of a pool: its load, its failures, and whether it takes requests. */
export class PooledInstance implements Instance {
  readonly role: Role;
  readonly url: string;
  readonly dataParallelRank: number | undefined;
  readonly kvEvents: string | undefined;
  readonly kvEventsReplay: string | undefined;
  readonly kv: InstanceKv | undefined;
  readonly label: string | undefined;
  readonly #clock: Clock;
  readonly #times: InstanceTimes;
  readonly #pairing: PooledInstanceOptions["pairing"];
  readonly #changed: () => void;
  readonly #loadChanged: (instance: PooledInstance) => void;
  #inFlight = 0;
  #inFlightElsewhere = 0;
  #requests = 0;
  #failures = 0;
  #consecutiveFailures = 0;
  #failedChecks = 0;
  #ejected = false;
  #unreachable = false;
  #seenAtMs = Number.NEGATIVE_INFINITY;
  #draining = false;
  #availableAtMs = Number.NEGATIVE_INFINITY;
  #returnedAtMs = Number.NEGATIVE_INFINITY;
  #lastError: KvError | undefined = undefined;
  readonly #waitingForIdle: (() => void)[] = [];

  constructor(
    role: Role,
    spec: InstanceSpec,
    { clock, times, pairing, changed = () => {}, loadChanged = () => {} }: PooledInstanceOptions,
  ) {
    this.role = role;
    this.url = spec.url;
    this.dataParallelRank = spec.dataParallelRank;
    this.kvEvents = spec.kvEvents;
    this.kvEventsReplay = spec.kvEventsReplay;
    this.kv = spec.kv;
    this.label = spec.label;
    this.#clock = clock;
    this.#times = times;
    this.#pairing = pairing;
    this.#changed = changed;
    this.#loadChanged = loadChanged;
  }

  /** Visits under way, those of other processes that share the instance included. */
  get inFlight(): number {
    return this.#inFlight + this.#inFlightElsewhere;
  }

  /** Visits of other processes under way, as far as this one was told. */
  set inFlightElsewhere(visits: number) {
    if (visits === this.#inFlightElsewhere) return;
    this.#inFlightElsewhere = visits;
    this.#loadChanged(this);
  }

  get ownInFlight(): number {
    return this.#inFlight;
  }

  get draining(): boolean {
    return this.#draining;
  }

  get seenAtMs(): number {
    return this.#seenAtMs;
  }

  /**
   * Whether it is neither draining, ejected, unreachable nor cooling down. `nowMs` is the clock's
   * time.
   */
  available(nowMs = this.#clock.now()): boolean {
    return !this.#ejected && !this.#unreachable && !this.#draining && nowMs >= this.#availableAtMs;
  }

  /**
   * The share of the requests that it takes: less than 1, and growing, after its return from
   * ejection.
   */
  returningShare(nowMs: number): number {
    return Math.min(1, (nowMs - this.#returnedAtMs + 1) / this.#times.slowReturnMs);
  }

  /** Until when it is available, or not, and returning, or not, unless it changes. */
  steadyUntilMs(nowMs: number): number {
    if (nowMs < this.#availableAtMs) return this.#availableAtMs;
    return this.#returning(nowMs)
      ? this.#returnedAtMs + this.#times.slowReturnMs
      : Number.POSITIVE_INFINITY;
  }

  begin(): Visit {
    this.#inFlight += 1;
    this.#requests += 1;
    this.#loadChanged(this);
    let isOpen = true;
    const end = (outcome: VisitOutcome) => {
      if (isOpen) this.#visitEnded(outcome);
      isOpen = false;
    };
    return {
      instance: this,
      succeeded: () => end("succeeded"),
      abandoned: () => end("abandoned"),
      failed: end,
    };
  }

  drain(draining: boolean): void {
    this.#draining = draining;
    this.#changed();
  }

  /**
   * Records a health check. `failuresToEject` failed ones in a row eject the instance; the first
   * successful one returns it. One that could not connect suffices to make it unavailable until the
   * next success.
   */
  checked(error: KvError | undefined, failuresToEject: number): void {
    if (error !== undefined) {
      this.#pairing?.failed(this);
      this.#failedChecks += 1;
      this.#lastError = error;
      if (failureStage(error) === "connect") this.#unreachable = true;
      if (this.#failedChecks >= failuresToEject) this.#ejected = true;
      this.#changed();
      return;
    }
    this.#failedChecks = 0;
    this.#seen();
    if (!this.#ejected) return;
    this.#ejected = false;
    this.#returnedAtMs = this.#clock.now();
    this.#consecutiveFailures = 0;
    this.#availableAtMs = Number.NEGATIVE_INFINITY;
    this.#changed();
  }

  idle(): Promise<void> {
    if (this.#inFlight === 0) return Promise.resolve();
    return new Promise((resolve) => this.#waitingForIdle.push(resolve));
  }

  status(): Omit<InstanceStatus, "pairing" | "kv_events"> {
    const error = this.#lastError;
    return {
      url: this.url,
      available: this.available(),
      state: this.#state(),
      data_parallel_rank: this.dataParallelRank ?? null,
      in_flight: this.#inFlight,
      requests: this.#requests,
      failures: this.#failures,
      consecutive_failures: this.#consecutiveFailures,
      last_error: error === undefined ? null : { code: error.code, message: error.message },
    };
  }

  #state(): InstanceStatus["state"] {
    if (this.#draining) return "draining";
    if (this.#ejected) return "ejected";
    if (this.#unreachable) return "unreachable";
    if (!this.available()) return "cooling-down";
    return this.#returning(this.#clock.now()) ? "returning" : "up";
  }

  #returning(nowMs: number): boolean {
    return nowMs - this.#returnedAtMs < this.#times.slowReturnMs;
  }

  #visitEnded(outcome: VisitOutcome): void {
    this.#inFlight -= 1;
    this.#loadChanged(this);
    if (outcome === "succeeded") {
      this.#consecutiveFailures = 0;
      this.#seen();
    } else if (outcome !== "abandoned") this.#visitFailed(outcome);
    if (this.#inFlight === 0) for (const resolve of this.#waitingForIdle.splice(0)) resolve();
  }

  #seen(): void {
    this.#seenAtMs = this.#clock.now();
    if (this.#unreachable) this.#changed();
    this.#unreachable = false;
    this.#pairing?.alive(this);
  }

  #visitFailed(error: KvError): void {
    this.#failures += 1;
    this.#consecutiveFailures += 1;
    this.#lastError = error;
    this.#pairing?.failed(this);
    // An answer, even a wrong one, shows that the instance runs.
    const stage = failureStage(error);
    if (stage === undefined || stage === "status") return;
    const { coolDownMs, maxCoolDownMs } = this.#times;
    const doubledMs = coolDownMs * 2 ** Math.min(this.#consecutiveFailures - 1, 20);
    this.#availableAtMs =
      this.#clock.now() + Math.min(doubledMs, Math.max(maxCoolDownMs, coolDownMs));
    this.#changed();
  }
}

type VisitOutcome = "succeeded" | "abandoned" | KvError;
