import { type Clock, KvError, type Log, type Timer } from "@kv/interface";
import { instanceName, type Role } from "../instances/instance.js";
import type { InstancePool } from "../instances/instance-pool.js";
import type { PooledInstance } from "../instances/pooled-instance.js";

/** How instances are checked. */
export interface HealthSettings {
  /** Between two rounds of checks, in milliseconds; 0 disables them. */
  readonly intervalMs: number;
  /** Time limit of one check, in milliseconds. */
  readonly timeoutMs: number;
  /** Path that is requested, such as `/health`. */
  readonly path: string;
  /** Failed checks in a row that eject an instance. */
  readonly failures: number;
}

/** One HTTP request for an instance's health. */
export interface HealthProbeRequest {
  /** The instance's role. */
  readonly role: Role;
  /** The instance's base URL. */
  readonly url: string;
  /** The path to GET there. */
  readonly path: string;
  /** The probe rejects when there is no answer by then, in milliseconds. */
  readonly timeoutMs: number;
}

/** Sends a health request and resolves with the HTTP status of the answer. The caller of `HealthChecks` provides it with its own HTTP client. */
export type HealthProbe = (request: HealthProbeRequest) => Promise<number>;

/**
 * Requests the health of every instance at an interval. A check fails when the instance cannot be reached, does not answer in time, or
 * answers with a status of 500 and more (vLLM answers 503 when its engine is dead). Any other status shows that the server runs.
 */
export class HealthChecks {
  readonly #pools: readonly InstancePool[];
  readonly #probe: HealthProbe;
  readonly #settings: HealthSettings;
  readonly #clock: Clock;
  readonly #log: Log;
  #timer: Timer | undefined = undefined;
  #closed = false;

  /** Begins to check after the first interval. */
  constructor(
    pools: readonly InstancePool[],
    probe: HealthProbe,
    settings: HealthSettings,
    { clock, log }: { clock: Clock; log: Log },
  ) {
    this.#pools = pools;
    this.#probe = probe;
    this.#settings = settings;
    this.#clock = clock;
    this.#log = log;
    this.#scheduleNext();
  }

  /** Ends the checks. The result of a check under way is ignored. */
  close(): void {
    this.#closed = true;
    this.#timer?.cancel();
  }

  /** As `close`. */
  [Symbol.dispose](): void {
    this.close();
  }

  #scheduleNext(): void {
    const { intervalMs } = this.#settings;
    if (this.#closed || intervalMs === 0) return;
    this.#timer = this.#clock.setTimer(() => {
      void this.#checkAll().finally(() => this.#scheduleNext());
    }, intervalMs);
  }

  async #checkAll(): Promise<void> {
    const instances = this.#pools.flatMap((pool) => pool.list());
    await Promise.all(instances.map((instance) => this.#check(instance)));
  }

  async #check(instance: PooledInstance): Promise<void> {
    const error = await this.#probeError(instance);
    if (this.#closed) return;
    const before = instance.status().state;
    instance.checked(error, this.#settings.failures);
    const after = instance.status().state;
    if (after === before || (after !== "ejected" && before !== "ejected")) return;
    const fields = { role: instance.role, instance: instanceName(instance), before, after, error };
    if (after === "ejected") this.#log.warn("instance-ejected", fields);
    else this.#log.info("instance-returned", fields);
  }

  async #probeError({ role, url }: PooledInstance): Promise<KvError | undefined> {
    const { path, timeoutMs } = this.#settings;
    try {
      const status = await this.#probe({ role, url, path, timeoutMs });
      if (status < 500) return undefined;
      const message = `the ${role} instance ${url}${path} answered with status ${status}`;
      return new KvError("KV_PROXY_UPSTREAM_FAILED", message, { hint: `see the log of ${url}` });
    } catch (error) {
      return KvError.from(error, "KV_INTERNAL", "the health check failed");
    }
  }
}
