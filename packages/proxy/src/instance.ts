import type { Clock, KvError, Random } from "@kv/interface";
import { failureStage, type Role } from "./upstream.js";

export interface Instance {
  readonly role: Role;
  readonly url: string;
  readonly inFlight: number;
  /** The rank of a data-parallel server that this instance stands for. */
  readonly dataParallelRank?: number | undefined;
  /** Where it publishes KV events (`tcp://host:port`), if it does. */
  readonly kvEvents?: string | undefined;
  /** Of a prefill instance: where decode workers meet its engine, for push. */
  readonly kv?: InstanceKv | undefined;
}

/** What is known beforehand of a prefill instance's engine; the rest has vLLM's defaults, or is learned from its answers. */
export interface InstanceKv {
  readonly engineId?: string | undefined;
  /** The instance's own host by default. */
  readonly host?: string | undefined;
  readonly port?: number | undefined;
  readonly tpSize?: number | undefined;
}

export interface InstanceStatus {
  readonly url: string;
  /** It takes requests: it has not failed lately, is not ejected and not draining. */
  readonly available: boolean;
  readonly state: "up" | "returning" | "cooling-down" | "ejected" | "draining";
  readonly data_parallel_rank: number | null;
  readonly in_flight: number;
  readonly requests: number;
  readonly failures: number;
  readonly consecutive_failures: number;
  readonly last_error: { readonly code: string; readonly message: string } | null;
}

/** A request at an instance; ends once, whatever is called later. */
export interface Visit {
  readonly instance: Instance;
  /** The instance did its part, an error of the client's included. */
  succeeded(): void;
  /** The client went away or the time was up: no word about the instance. */
  abandoned(): void;
  failed(error: KvError): void;
}

/** What tells an instance from the others of its role: ranks of one data-parallel server share their URL. */
export interface InstanceId {
  readonly url: string;
  readonly dataParallelRank?: number | undefined;
}

/** `URL`, or `URL@RANK`. */
export function instanceName({ url, dataParallelRank }: InstanceId): string {
  return dataParallelRank === undefined ? url : `${url}@${dataParallelRank}`;
}

export interface InstanceSpec extends InstanceId {
  readonly kvEvents?: string | undefined;
  readonly kv?: InstanceKv | undefined;
}

export interface InstanceTimes {
  /** How long an instance is left out that failed; doubles with each failure in a row, up to `maxCoolDownMs`. */
  readonly coolDownMs: number;
  readonly maxCoolDownMs: number;
  /** Over how long an ejected instance that is back takes a growing share of the requests. */
  readonly slowReturnMs: number;
}

/** An instance as its pool sees it. */
export interface PooledInstance extends Instance {
  readonly draining: boolean;
  available(): boolean;
  /** Available, and this request is not one that it leaves to others while it comes back slowly. `nowMs` is the clock's. */
  admits(nowMs: number): boolean;
  begin(): Visit;
  drain(draining: boolean): void;
  /** A health check's word. Ejected by `failures` bad ones in a row, taken back by the first good one. */
  checked(error: KvError | undefined, failures: number): void;
  idle(): Promise<void>;
  status(): InstanceStatus;
}

export interface PooledInstanceOptions {
  readonly clock: Clock;
  readonly random: Random;
  readonly times: InstanceTimes;
}

type VisitOutcome = "succeeded" | "abandoned" | KvError;

/** A class, as every leg of every request has one. */
class OpenVisit implements Visit {
  readonly instance: Instance;
  #ended: ((outcome: VisitOutcome) => void) | undefined;

  constructor(instance: Instance, ended: (outcome: VisitOutcome) => void) {
    this.instance = instance;
    this.#ended = ended;
  }

  succeeded(): void {
    this.#end("succeeded");
  }

  abandoned(): void {
    this.#end("abandoned");
  }

  failed(error: KvError): void {
    this.#end(error);
  }

  #end(outcome: VisitOutcome): void {
    const ended = this.#ended;
    this.#ended = undefined;
    ended?.(outcome);
  }
}

export function createPooledInstance(
  role: Role,
  spec: InstanceSpec,
  { clock, random, times }: PooledInstanceOptions,
): PooledInstance {
  let inFlight = 0;
  let requests = 0;
  let failures = 0;
  let consecutiveFailures = 0;
  let badChecks = 0;
  let ejected = false;
  let draining = false;
  let availableAtMs = Number.NEGATIVE_INFINITY;
  let returnedAtMs = Number.NEGATIVE_INFINITY;
  let lastError: KvError | undefined;
  const waiting: (() => void)[] = [];

  const returning = (nowMs = clock.now()) => nowMs - returnedAtMs < times.slowReturnMs;
  const available = (nowMs = clock.now()) => !ejected && !draining && nowMs >= availableAtMs;
  function state(): InstanceStatus["state"] {
    if (draining) return "draining";
    if (ejected) return "ejected";
    if (!available()) return "cooling-down";
    return returning() ? "returning" : "up";
  }
  function coolDown(): void {
    const doubled = times.coolDownMs * 2 ** Math.min(consecutiveFailures - 1, 20);
    availableAtMs = clock.now() + Math.min(doubled, Math.max(times.maxCoolDownMs, times.coolDownMs));
  }

  function ended(outcome: VisitOutcome): void {
    inFlight--;
    if (outcome === "succeeded") consecutiveFailures = 0;
    else if (outcome !== "abandoned") {
      failures++;
      consecutiveFailures++;
      lastError = outcome;
      // An answer, even a bad one, shows that the instance is there.
      const stage = failureStage(outcome);
      if (stage !== undefined && stage !== "status") coolDown();
    }
    if (inFlight === 0) for (const resolve of waiting.splice(0)) resolve();
  }

  const instance: PooledInstance = {
    role,
    url: spec.url,
    dataParallelRank: spec.dataParallelRank,
    kvEvents: spec.kvEvents,
    kv: spec.kv,
    get inFlight() {
      return inFlight;
    },
    get draining() {
      return draining;
    },
    available: () => available(),
    admits: (nowMs) =>
      available(nowMs) &&
      (!returning(nowMs) || random.next() < (nowMs - returnedAtMs + 1) / times.slowReturnMs),
    begin() {
      inFlight++;
      requests++;
      return new OpenVisit(instance, ended);
    },
    drain(value) {
      draining = value;
    },
    checked(error, limit) {
      if (error === undefined) {
        badChecks = 0;
        if (ejected) {
          returnedAtMs = clock.now();
          consecutiveFailures = 0;
          availableAtMs = Number.NEGATIVE_INFINITY;
        }
        ejected = false;
        return;
      }
      badChecks++;
      lastError = error;
      if (badChecks >= limit) ejected = true;
    },
    idle: () => (inFlight === 0 ? Promise.resolve() : new Promise((resolve) => waiting.push(resolve))),
    status: () => ({
      url: spec.url,
      available: available(),
      state: state(),
      data_parallel_rank: spec.dataParallelRank ?? null,
      in_flight: inFlight,
      requests,
      failures,
      consecutive_failures: consecutiveFailures,
      last_error: lastError === undefined ? null : { code: lastError.code, message: lastError.message },
    }),
  };
  return instance;
}
