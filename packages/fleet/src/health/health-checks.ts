import { type Clock, KvError } from "@kv/interface";
import type { PooledInstance } from "../instances/pooled-instance.js";
import type { InstanceGet } from "../pairing/engine-facts.js";
import { repeat } from "../repeat.js";
import type { InstancePool } from "../routing/instance-pool.js";

/** How instances are checked. */
export interface HealthSettings {
  /** Between two rounds; 0 disables them. */
  readonly intervalMs: number;
  readonly timeoutMs: number;
  readonly path: string;
  readonly failures: number;
}

/** An instance seen this recently waits for the next round. */
const FRESH_MS = 1000;

/**
 * Checks every instance when it is added, at an interval, and on `verify`. A check fails without an
 * answer in time or with 500 or more (vLLM answers 503 when its engine is dead).
 */
export class HealthChecks {
  readonly #checking = new Map<PooledInstance, Promise<void>>();
  readonly #checkedAtMs = new WeakMap<PooledInstance, number>();
  #rounds: { close(): void } | undefined;
  #closed = false;

  constructor(
    private readonly pools: readonly InstancePool[],
    private readonly get: InstanceGet,
    private readonly settings: HealthSettings,
    private readonly clock: Clock,
  ) {
    if (settings.intervalMs > 0) this.#rounds = repeat(clock, () => this.#round());
  }

  check(instance: PooledInstance): void {
    if (this.settings.intervalMs > 0 && !this.#closed) void this.#check(instance);
  }

  /** Resolves once each pool has an available instance seen within a second, or all are checked. */
  async verify(): Promise<void> {
    if (this.settings.intervalMs === 0 || this.#closed) return;
    const sinceMs = this.clock.now() - FRESH_MS;
    const isVerified = () =>
      this.pools.every((pool) =>
        pool.list().some((one) => one.seenAtMs >= sinceMs && one.available()),
      );
    if (isVerified()) return;
    const checks = this.pools
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
    this.#rounds?.close();
  }

  [Symbol.dispose](): void {
    this.close();
  }

  async #round(): Promise<number> {
    const instances = this.pools.flatMap((pool) => pool.list());
    await Promise.all(instances.map((instance) => this.#check(instance)));
    return this.settings.intervalMs;
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
    const { path, timeoutMs, failures } = this.settings;
    const { role, url } = instance;
    this.#checkedAtMs.set(instance, this.clock.now());
    let error: KvError | undefined;
    try {
      const { status } = await this.get({ role, url, path, timeoutMs });
      const message = `the ${role} instance ${url}${path} answered with status ${status}`;
      const hint = `see the log of ${url}`;
      if (status >= 500) error = new KvError("KV_PROXY_UPSTREAM_FAILED", message, { hint });
    } catch (thrown) {
      error = KvError.from(thrown, "KV_INTERNAL", "the health check failed");
    }
    if (!this.#closed) instance.checked(error, failures);
  }
}
