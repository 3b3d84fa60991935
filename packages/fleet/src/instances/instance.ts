import { type Clock, KvError, type Random } from "@kv/interface";

/** What an instance does for a request: compute the prompt's KV cache, or generate from it. */
export type Role = "prefill" | "decode";

/** What tells an instance from the others of its role. The ranks of one data-parallel server share their URL. */
export interface InstanceId {
  /** Base URL without a slash at its end, such as `http://p1:8100`. */
  readonly url: string;
  /** The rank of a data-parallel server that this instance stands for. */
  readonly dataParallelRank?: number | undefined;
}

/** The instance's name in logs and errors: `URL`, or `URL@RANK`. */
export function instanceName({ url, dataParallelRank }: InstanceId): string {
  return dataParallelRank === undefined ? url : `${url}@${dataParallelRank}`;
}

/**
 * What is configured about the engine of a prefill instance, so that a decode engine can register with it for push before it has
 * answered. A member that is absent has vLLM's default, or is learned from the instance's answers.
 */
export interface InstanceKv {
  /** vLLM's `engine_id`. */
  readonly engineId?: string | undefined;
  /** Host of the engine's side channel; by default the host of the instance's URL. */
  readonly host?: string | undefined;
  /** Port of the engine's side channel; by default 5600 (`VLLM_NIXL_SIDE_CHANNEL_PORT`). */
  readonly port?: number | undefined;
  /** Tensor-parallel size of the engine; by default 1. */
  readonly tpSize?: number | undefined;
}

/** A description of an instance, from a configuration or a discovery. */
export interface InstanceSpec extends InstanceId {
  /** ZMQ endpoint of the instance's KV events, `tcp://host:port`. */
  readonly kvEvents?: string | undefined;
  /** Of a prefill instance that pushes: where its engine is reached. */
  readonly kv?: InstanceKv | undefined;
}

/** An instance as a routing strategy sees it. */
export interface Instance extends InstanceSpec {
  /** The role of the instance's pool. */
  readonly role: Role;
  /** Visits that have begun and not ended. */
  readonly inFlight: number;
}

/** The state of an instance as JSON, for status pages. */
export interface InstanceStatus {
  /** Base URL. */
  readonly url: string;
  /** True in the states `up` and `returning`. */
  readonly available: boolean;
  /**
   * `cooling-down`: left out for a while after a failure; `ejected`: by health checks; `returning`: back from ejection with a growing
   * share of the requests; `draining`: takes no more requests.
   */
  readonly state: "up" | "returning" | "cooling-down" | "ejected" | "draining";
  /** Null for an instance that is not one rank of a data-parallel server. */
  readonly data_parallel_rank: number | null;
  /** Visits under way. */
  readonly in_flight: number;
  /** Visits since the start. */
  readonly requests: number;
  /** Visits that failed since the start. */
  readonly failures: number;
  /** Visits that failed since the last one that succeeded. */
  readonly consecutive_failures: number;
  /** The last failed visit or health check; null when there was none. */
  readonly last_error: { readonly code: string; readonly message: string } | null;
}

/** One request at one instance. The first of the three calls ends it; later calls do nothing. */
export interface Visit {
  /** The instance that is visited. */
  readonly instance: Instance;
  /** The instance did its part. An error that the client caused counts as success. */
  succeeded(): void;
  /** The client disconnected or a time limit ended the request: this says nothing about the instance. */
  abandoned(): void;
  /** The instance failed. It cools down where `failureStage(error)` is `connect`, `answer` or `body`. */
  failed(error: KvError): void;
}

/**
 * How far an exchange with an instance had come when it failed. `connect`: nothing of the request has left; `answer`: the connection
 * closed before the answer began; `body`: it closed in the middle of the answer; `status`: the answer was a 500, 502, 503 or 504.
 */
export type FailureStage = "connect" | "answer" | "body" | "status";

const STAGES: readonly FailureStage[] = ["connect", "answer", "body", "status"];

/** The `details.stage` of a `KV_PROXY_UPSTREAM_FAILED`; undefined for any other error. */
export function failureStage(error: unknown): FailureStage | undefined {
  if (!KvError.is(error, "KV_PROXY_UPSTREAM_FAILED")) return undefined;
  const { stage } = error.details;
  return STAGES.find((known) => known === stage);
}

/** Times, in milliseconds, for which a pool leaves instances out. */
export interface InstanceTimes {
  /** How long an instance is left out after a failure; doubles with each further failure in a row. */
  readonly coolDownMs: number;
  /** The longest cool-down. */
  readonly maxCoolDownMs: number;
  /** How long an ejected instance that is back takes a growing share of the requests. */
  readonly slowReturnMs: number;
}

/** What an instance of a pool takes from outside. */
export interface PooledInstanceOptions {
  readonly clock: Clock;
  readonly random: Random;
  readonly times: InstanceTimes;
}

/** An instance of a pool: its load, its failures, and whether it takes requests. */
export class PooledInstance implements Instance {
  readonly role: Role;
  readonly url: string;
  readonly dataParallelRank: number | undefined;
  readonly kvEvents: string | undefined;
  readonly kv: InstanceKv | undefined;
  readonly #clock: Clock;
  readonly #random: Random;
  readonly #times: InstanceTimes;
  #inFlight = 0;
  #requests = 0;
  #failures = 0;
  #consecutiveFailures = 0;
  #failedChecks = 0;
  #ejected = false;
  #draining = false;
  #availableAtMs = Number.NEGATIVE_INFINITY;
  #returnedAtMs = Number.NEGATIVE_INFINITY;
  #lastError: KvError | undefined = undefined;
  readonly #waitingForIdle: (() => void)[] = [];

  constructor(role: Role, spec: InstanceSpec, { clock, random, times }: PooledInstanceOptions) {
    this.role = role;
    this.url = spec.url;
    this.dataParallelRank = spec.dataParallelRank;
    this.kvEvents = spec.kvEvents;
    this.kv = spec.kv;
    this.#clock = clock;
    this.#random = random;
    this.#times = times;
  }

  get inFlight(): number {
    return this.#inFlight;
  }

  /** True from `drain(true)` until `drain(false)`. */
  get draining(): boolean {
    return this.#draining;
  }

  /** Whether it is neither draining, ejected nor cooling down. `nowMs` is the clock's time. */
  available(nowMs = this.#clock.now()): boolean {
    return !this.#ejected && !this.#draining && nowMs >= this.#availableAtMs;
  }

  /** Whether it takes this request: an instance that returns from ejection admits a random, growing share. */
  admits(nowMs: number): boolean {
    if (!this.available(nowMs)) return false;
    if (!this.#returning(nowMs)) return true;
    return this.#random.next() < (nowMs - this.#returnedAtMs + 1) / this.#times.slowReturnMs;
  }

  /** Begins a visit, which counts as load until it ends. */
  begin(): Visit {
    this.#inFlight += 1;
    this.#requests += 1;
    return new OpenVisit(this, (outcome) => this.#visitEnded(outcome));
  }

  /** Stops or resumes taking requests. */
  drain(draining: boolean): void {
    this.#draining = draining;
  }

  /** Records a health check. `failuresToEject` failed ones in a row eject the instance; the first good one takes it back. */
  checked(error: KvError | undefined, failuresToEject: number): void {
    if (error !== undefined) {
      this.#failedChecks += 1;
      this.#lastError = error;
      if (this.#failedChecks >= failuresToEject) this.#ejected = true;
      return;
    }
    this.#failedChecks = 0;
    if (!this.#ejected) return;
    this.#ejected = false;
    this.#returnedAtMs = this.#clock.now();
    this.#consecutiveFailures = 0;
    this.#availableAtMs = Number.NEGATIVE_INFINITY;
  }

  /** Resolves when no visit is under way. */
  idle(): Promise<void> {
    if (this.#inFlight === 0) return Promise.resolve();
    return new Promise((resolve) => this.#waitingForIdle.push(resolve));
  }

  /** The present state as JSON. */
  status(): InstanceStatus {
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
    if (!this.available()) return "cooling-down";
    return this.#returning(this.#clock.now()) ? "returning" : "up";
  }

  #returning(nowMs: number): boolean {
    return nowMs - this.#returnedAtMs < this.#times.slowReturnMs;
  }

  #visitEnded(outcome: VisitOutcome): void {
    this.#inFlight -= 1;
    if (outcome === "succeeded") this.#consecutiveFailures = 0;
    else if (outcome !== "abandoned") this.#visitFailed(outcome);
    if (this.#inFlight === 0) for (const resolve of this.#waitingForIdle.splice(0)) resolve();
  }

  #visitFailed(error: KvError): void {
    this.#failures += 1;
    this.#consecutiveFailures += 1;
    this.#lastError = error;
    // An answer, even a wrong one, shows that the instance runs.
    const stage = failureStage(error);
    if (stage === undefined || stage === "status") return;
    const { coolDownMs, maxCoolDownMs } = this.#times;
    const doubledMs = coolDownMs * 2 ** Math.min(this.#consecutiveFailures - 1, 20);
    this.#availableAtMs = this.#clock.now() + Math.min(doubledMs, Math.max(maxCoolDownMs, coolDownMs));
  }
}

type VisitOutcome = "succeeded" | "abandoned" | KvError;

class OpenVisit implements Visit {
  readonly instance: Instance;
  #onEnd: ((outcome: VisitOutcome) => void) | undefined;

  constructor(instance: Instance, onEnd: (outcome: VisitOutcome) => void) {
    this.instance = instance;
    this.#onEnd = onEnd;
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
    const onEnd = this.#onEnd;
    this.#onEnd = undefined;
    onEnd?.(outcome);
  }
}
