import { type Clock, type KvError, type Log, type LogFields, silentLog } from "@kv/interface";
import {
  failureStage,
  type Instance,
  type InstanceKv,
  type InstanceSpec,
  type InstanceStatus,
  instanceName,
  type Role,
  type Visit,
} from "./instance.js";

/** How long a pool leaves instances out, in milliseconds. */
export interface InstanceTimes {
  /** Doubles with each further failure in a row. */
  readonly coolDownMs: number;
  readonly maxCoolDownMs: number;
  /** How long a returning instance takes a growing share. */
  readonly slowReturnMs: number;
}

/** When failed visits eject an instance, and for how long, as Envoy names it. */
export interface OutlierDetection {
  /** Failed visits in a row that eject an instance; 0: none do. */
  readonly consecutiveFailures: number;
  /** Until the first try, in milliseconds. Each failed try adds as much again. */
  readonly baseEjectionTimeMs: number;
  readonly maxEjectionTimeMs: number;
}

/** Options of `PooledInstance`. */
export interface PooledInstanceOptions {
  readonly clock: Clock;
  readonly times: InstanceTimes;
  /** @default failed visits eject no instance */
  readonly outlierDetection?: OutlierDetection | undefined;
  /** @default `silentLog` */
  readonly log?: Log | undefined;
  /** Learns that an engine may have restarted. */
  readonly pairing?:
    | { failed(instance: Instance): void; alive(instance: Instance): void }
    | undefined;
}

interface InstanceOwner {
  /** The instance starts or stops taking requests, except by time. */
  changed(): void;
  loadChanged(instance: PooledInstance): void;
  list(): readonly PooledInstance[];
}

interface Absence {
  readonly state: "cooling-down" | "unreachable" | "ejected";
  readonly untilMs: number;
}

/**
 * An instance of a pool, and whether it takes requests.
 *
 * ```text
 * up ── a connection failed ──> cooling-down ── time ──> up
 * up ── failed visits in a row ──> ejected ── time ──> half-open: one visit at a time
 * half-open ── it succeeds ──> returning ── time ──> up;  ── it fails ──> ejected, for longer
 * any ── a check could not connect ──> unreachable ── the next success ──> up
 * any ── failed checks in a row ──> ejected ── a successful check ──> returning
 * ```
 *
 * Failed visits eject an instance only while another takes all requests and has not just failed.
 * When the last such one goes, ejected ones become half-open without a limit of visits.
 */
export class PooledInstance implements Instance {
  readonly role: Role;
  readonly url: string;
  readonly dataParallelRank: number | undefined;
  readonly kvEvents: string | undefined;
  readonly kvEventsReplay: string | undefined;
  readonly kv: InstanceKv | undefined;
  readonly label: string | undefined;
  readonly #options: PooledInstanceOptions;
  readonly #owner: InstanceOwner;
  #inFlight = 0;
  #inFlightElsewhere = 0;
  #requests = 0;
  #failures = 0;
  #consecutiveFailures = 0;
  #failedChecks = 0;
  #out: Absence | undefined;
  #isTried = false;
  #ejections = 0;
  #ejectionsInRow = 0;
  #seenAtMs = Number.NEGATIVE_INFINITY;
  #draining = false;
  #warming = false;
  #returnedAtMs = Number.NEGATIVE_INFINITY;
  #lastError: KvError | undefined;
  readonly #waitingForIdle: (() => void)[] = [];

  constructor(
    role: Role,
    spec: InstanceSpec,
    options: PooledInstanceOptions,
    owner: InstanceOwner,
  ) {
    this.role = role;
    this.url = spec.url;
    this.dataParallelRank = spec.dataParallelRank;
    this.kvEvents = spec.kvEvents;
    this.kvEventsReplay = spec.kvEventsReplay;
    this.kv = spec.kv;
    this.label = spec.label;
    this.#options = options;
    this.#owner = owner;
  }

  get inFlight(): number {
    return this.#inFlight + this.#inFlightElsewhere;
  }

  set inFlightElsewhere(visits: number) {
    if (visits === this.#inFlightElsewhere) return;
    this.#inFlightElsewhere = visits;
    this.#owner.loadChanged(this);
  }

  get ownInFlight(): number {
    return this.#inFlight;
  }

  get draining(): boolean {
    return this.#draining;
  }

  get #nowMs(): number {
    return this.#options.clock.now();
  }

  get seenAtMs(): number {
    return this.#seenAtMs;
  }

  available(nowMs = this.#nowMs): boolean {
    if (this.takesAll(nowMs)) return true;
    if (this.#state(nowMs) !== "half-open") return false;
    return !this.#isTried || !this.#hasOther(nowMs);
  }

  takesAll(nowMs: number): boolean {
    if (this.#draining || this.#isKeptWarming(nowMs)) return false;
    return this.#isUp(nowMs);
  }

  #isUp(nowMs: number): boolean {
    const out = this.#out;
    return out === undefined || (out.state === "cooling-down" && nowMs >= out.untilMs);
  }

  /** Below 1, and growing, after an ejection. */
  returningShare(nowMs: number): number {
    const { slowReturnMs } = this.#options.times;
    return Math.min(1, (nowMs - this.#returnedAtMs + 1) / slowReturnMs);
  }

  /** Until when its availability and share stay, unless something happens. */
  steadyUntilMs(nowMs: number): number {
    const { untilMs = nowMs } = this.#out ?? {};
    if (nowMs < untilMs) return untilMs;
    return this.#returning(nowMs)
      ? this.#returnedAtMs + this.#options.times.slowReturnMs
      : Number.POSITIVE_INFINITY;
  }

  begin(): Visit {
    this.#inFlight += 1;
    this.#requests += 1;
    const isTry = this.#out !== undefined && this.#state(this.#nowMs) === "half-open";
    if (isTry) this.#setTried(true);
    this.#owner.loadChanged(this);
    let isOpen = true;
    const end = (outcome: VisitOutcome) => {
      if (!isOpen) return;
      isOpen = false;
      this.#visitEnded(outcome);
      if (isTry) this.#setTried(false);
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
    this.#owner.changed();
  }

  /** While it fetches prompts, it takes no load that another instance takes. */
  warm(warming: boolean): void {
    this.#warming = warming;
    this.#owner.changed();
  }

  #isKeptWarming(nowMs: number): boolean {
    const takesLoad = (one: PooledInstance) => !one.#draining && !one.#warming && one.#isUp(nowMs);
    return this.#warming && this.#owner.list().some(takesLoad);
  }

  /**
   * `failuresToEject` failures in a row eject the instance, and a success returns it. A failed
   * connection makes it unavailable until the next success. A check does not end an ejection by
   * visits, since an engine may pass checks and fail all requests.
   */
  checked(error: KvError | undefined, failuresToEject: number): void {
    if (error === undefined) {
      this.#failedChecks = 0;
      this.#seen();
      if (this.#isOutByChecks()) this.#return();
      return;
    }
    this.#options.pairing?.failed(this);
    this.#failedChecks += 1;
    this.#lastError = error;
    const untilMs = Number.POSITIVE_INFINITY;
    if (this.#failedChecks >= failuresToEject) this.#leave({ state: "ejected", untilMs });
    else if (failureStage(error) === "connect" && !this.#isOutByChecks())
      this.#leave({ state: "unreachable", untilMs });
  }

  idle(): Promise<void> {
    if (this.#inFlight === 0) return Promise.resolve();
    return new Promise((resolve) => this.#waitingForIdle.push(resolve));
  }

  status(): Omit<InstanceStatus, "pairing" | "kv_events"> {
    const nowMs = this.#nowMs;
    const error = this.#lastError;
    return {
      url: this.url,
      available: this.available(nowMs),
      state: this.#state(nowMs),
      data_parallel_rank: this.dataParallelRank ?? null,
      in_flight: this.#inFlight,
      requests: this.#requests,
      failures: this.#failures,
      consecutive_failures: this.#consecutiveFailures,
      ejections: this.#ejections,
      last_error: error === undefined ? null : { code: error.code, message: error.message },
    };
  }

  #state(nowMs: number): InstanceStatus["state"] {
    if (this.#draining) return "draining";
    if (this.#isKeptWarming(nowMs)) return "warming";
    const out = this.#out;
    if (out === undefined || this.takesAll(nowMs))
      return this.#returning(nowMs) ? "returning" : "up";
    if (out.state !== "ejected" || this.#isOutByChecks()) return out.state;
    const isEjected = nowMs < out.untilMs && this.#hasOther(nowMs);
    return isEjected ? "ejected" : "half-open";
  }

  #returning(nowMs: number): boolean {
    return nowMs - this.#returnedAtMs < this.#options.times.slowReturnMs;
  }

  #isOutByChecks(): boolean {
    return this.#out?.state === "ejected" && this.#out.untilMs === Number.POSITIVE_INFINITY;
  }

  #setTried(isTried: boolean): void {
    this.#isTried = isTried;
    this.#owner.changed();
  }

  #visitEnded(outcome: VisitOutcome): void {
    this.#inFlight -= 1;
    this.#owner.loadChanged(this);
    if (outcome === "succeeded") {
      this.#consecutiveFailures = 0;
      this.#seen();
      if (this.#out !== undefined && this.#state(this.#nowMs) === "half-open") this.#return();
    } else if (outcome !== "abandoned") this.#visitFailed(outcome);
    if (this.#inFlight === 0) for (const resolve of this.#waitingForIdle.splice(0)) resolve();
  }

  #seen(): void {
    this.#seenAtMs = this.#nowMs;
    if (this.#out?.state === "unreachable") this.#return();
    this.#options.pairing?.alive(this);
  }

  #visitFailed(error: KvError): void {
    this.#failures += 1;
    this.#consecutiveFailures += 1;
    this.#lastError = error;
    const { times, outlierDetection: detection, pairing } = this.#options;
    pairing?.failed(this);
    const nowMs = this.#nowMs;
    const state = this.#state(nowMs);
    // Visits that began before the ejection fail too.
    if (state === "ejected" || state === "unreachable") return;
    if (detection !== undefined && this.#isOutlier(state, detection.consecutiveFailures, nowMs)) {
      const { baseEjectionTimeMs: baseMs, maxEjectionTimeMs: maxMs } = detection;
      this.#ejectionsInRow = state === "half-open" ? this.#ejectionsInRow + 1 : 1;
      const forMs = Math.min(baseMs * this.#ejectionsInRow, Math.max(maxMs, baseMs));
      this.#leave({ state: "ejected", untilMs: nowMs + forMs });
      return;
    }
    // Even a wrong answer shows that the instance runs.
    const stage = failureStage(error);
    if (state === "half-open" || stage === undefined || stage === "status") return;
    const { coolDownMs, maxCoolDownMs } = times;
    const doubledMs = coolDownMs * 2 ** Math.min(this.#consecutiveFailures - 1, 20);
    const forMs = Math.min(doubledMs, Math.max(maxCoolDownMs, coolDownMs));
    this.#leave({ state: "cooling-down", untilMs: nowMs + forMs });
  }

  /** If all instances fail, the fault is not this one's. */
  #isOutlier(state: InstanceStatus["state"], limit: number, nowMs: number): boolean {
    if (limit === 0 || (state !== "half-open" && this.#consecutiveFailures < limit)) return false;
    return this.#hasOther(nowMs, (other) => other.#consecutiveFailures === 0);
  }

  #hasOther(nowMs: number, is = (_other: PooledInstance) => true): boolean {
    return this.#owner.list().some((other) => other !== this && other.takesAll(nowMs) && is(other));
  }

  #leave(out: Absence): void {
    const before = this.#state(this.#nowMs);
    this.#out = out;
    this.#owner.changed();
    if (out.state === before || out.state === "cooling-down") return;
    if (out.state === "ejected") this.#ejections += 1;
    const { log = silentLog } = this.#options;
    log.warn(`instance-${out.state}`, { ...this.#change(before), error: this.#lastError });
  }

  /** After an ejection it takes only a share at first. */
  #return(): void {
    const nowMs = this.#nowMs;
    const before = this.#state(nowMs);
    this.#out = undefined;
    if (before !== "unreachable") {
      this.#returnedAtMs = nowMs;
      this.#consecutiveFailures = 0;
    }
    this.#owner.changed();
    const { log = silentLog } = this.#options;
    log.info("instance-returned", this.#change(before));
  }

  #change(before: InstanceStatus["state"]): LogFields {
    const after = this.#state(this.#nowMs);
    const consecutiveFailures = this.#consecutiveFailures;
    return { role: this.role, instance: instanceName(this), before, after, consecutiveFailures };
  }
}

type VisitOutcome = "succeeded" | "abandoned" | KvError;

interface Store<K, V> {
  get(key: K): V | undefined;
  set(key: K, value: V): unknown;
}

/** Puts a value last. Above `most`, the map forgets its first ones. */
export function putLast<K, V>(map: Map<K, V>, key: K, value: V, most: number): void {
  map.delete(key);
  map.set(key, value);
  for (const first of map.keys()) {
    if (map.size <= most) return;
    map.delete(first);
  }
}

/** The value of a map or weak map at `key`, where `make` puts one at the first call. */
export function getOrAdd<K, V>(store: Store<K, V>, key: K, make: () => V): V {
  let value = store.get(key);
  if (value === undefined) {
    value = make();
    store.set(key, value);
  }
  return value;
}
