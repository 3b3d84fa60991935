import { type Clock, KvError, type Log, type Timer } from "@kv/interface";
import { type InstanceStatus, instanceName } from "../instances/instance.js";
import type { PooledInstance } from "../instances/pooled-instance.js";
import type { InstanceGetRequest } from "../pairing/engine-facts.js";
import type { InstancePool } from "../routing/instance-pool.js";

/** How instances are checked. */
export interface HealthSettings {
  /** Between two rounds of checks, in milliseconds; 0 disables them. */
  readonly intervalMs: number;
  readonly timeoutMs: number;
  readonly path: string;
  readonly failures: number;
}

/** One HTTP request for an instance's health. */
export type HealthProbeRequest = InstanceGetRequest;

/**
 * Sends a health request and resolves with the HTTP status of the answer. The caller of
 * `HealthChecks` provides it with its own HTTP client.
 */
export type HealthProbe = (request: HealthProbeRequest) => Promise<number>;

/** An instance that answered this recently is not asked again before the next round. */
const FRESH_MS = 1000;

/**
 * Requests the health of every instance when it is added, at an interval, and when `verify` asks
 * for it. A check fails when the instance cannot be reached, does not answer in time, or answers
 * with a status of 500 and more (vLLM answers 503 when its engine is dead). Any other status shows
 * that the server runs.
 */
export class HealthChecks {
  readonly #pools: readonly InstancePool[];
  readonly #probe: HealthProbe;
  readonly #settings: HealthSettings;
  readonly #clock: Clock;
  readonly #log: Log;
  readonly #checking = new Map<PooledInstance, Promise<void>>();
  readonly #checkedAtMs = new WeakMap<PooledInstance, number>();
  #timer: Timer | undefined = undefined;
  #closed = false;

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
    if (settings.intervalMs > 0) void this.#round();
  }

  check(instance: PooledInstance): void {
    if (this.#settings.intervalMs > 0 && !this.#closed) void this.#check(instance);
  }

  /**
   * Checks the instances that were neither seen nor checked within the last second. Resolves as
   * soon as each pool has an available instance that was seen within it, at the latest when all
   * checks have ended; at once where checks are disabled.
   */
  async verify(): Promise<void> {
    if (this.#settings.intervalMs === 0 || this.#closed) return;
    const sinceMs = this.#clock.now() - FRESH_MS;
    const isVerified = () =>
      this.#pools.every((pool) =>
        pool.list().some((one) => one.seenAtMs >= sinceMs && one.available()),
      );
    if (isVerified()) return;
    const checks = this.#pools
      .flatMap((pool) => pool.list())
      .filter(
        (one) =>
          Math.max(one.seenAtMs, this.#checkedAtMs.get(one) ?? Number.NEGATIVE_INFINITY) < sinceMs,
      )
      .map((one) => this.#check(one));
    await new Promise<void>((resolve) => {
      for (const check of checks) void check.then(() => isVerified() && resolve());
      void Promise.all([...checks, ...this.#checking.values()]).then(() => resolve());
    });
  }

  close(): void {
    this.#closed = true;
    this.#timer?.cancel();
  }

  [Symbol.dispose](): void {
    this.close();
  }

  async #round(): Promise<void> {
    const instances = this.#pools.flatMap((pool) => pool.list());
    await Promise.all(instances.map((instance) => this.#check(instance)));
    if (this.#closed) return;
    this.#timer = this.#clock.setTimer(() => void this.#round(), this.#settings.intervalMs);
  }

  #check(instance: PooledInstance): Promise<void> {
    let check = this.#checking.get(instance);
    if (check === undefined) {
      check = this.#checkOnce(instance).finally(() => this.#checking.delete(instance));
      this.#checking.set(instance, check);
    }
    return check;
  }

  async #checkOnce(instance: PooledInstance): Promise<void> {
    this.#checkedAtMs.set(instance, this.#clock.now());
    const error = await this.#probeError(instance);
    if (this.#closed) return;
    const before = instance.status().state;
    instance.checked(error, this.#settings.failures);
    const after = instance.status().state;
    if (after === before || (!isOut(after) && !isOut(before))) return;
    const fields = { role: instance.role, instance: instanceName(instance), before, after, error };
    if (isOut(after)) this.#log.warn(`instance-${after}`, fields);
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

/** Whether health checks keep an instance in this state from requests. */
function isOut(state: InstanceStatus["state"]): state is "ejected" | "unreachable" {
  return state === "ejected" || state === "unreachable";
}
