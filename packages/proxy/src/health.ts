import { type Ambient, KvError, type Timer } from "@kv/interface";
import { hold } from "./bounded-body.js";
import { createDeadline } from "./deadline.js";
import { instanceName, type PooledInstance } from "./instance.js";
import type { InstancePool } from "./instances.js";
import type { Upstream } from "./upstream.js";

export interface HealthSettings {
  /** Between two checks of an instance; 0: none. */
  readonly intervalMs: number;
  readonly timeoutMs: number;
  readonly path: string;
  /** Bad checks in a row that eject. */
  readonly failures: number;
}

export interface HealthChecks {
  /** Checks all instances once, now. */
  check(): Promise<void>;
  close(): void;
}

/**
 * Asks every instance for its health at an interval. Unreachable, too late or a status of 500 and more is bad (vLLM answers 503 when
 * its engine is dead); another status shows a server that is there.
 */
export function createHealthChecks(
  pools: readonly InstancePool[],
  upstream: Upstream,
  settings: HealthSettings,
  { clock, log }: Pick<Ambient, "clock" | "log">,
): HealthChecks {
  let timer: Timer | undefined;
  let closed = false;

  async function ask(instance: PooledInstance): Promise<KvError | undefined> {
    const deadline = createDeadline({ clock, requestMs: settings.timeoutMs });
    const { role, url } = instance;
    try {
      const answer = await upstream.send({
        role,
        url,
        method: "GET",
        path: settings.path,
        headers: {},
        ending: deadline,
      });
      await hold(answer.body, 64 * 1024);
      answer.discard();
      if (answer.status < 500) return undefined;
      const message = `the ${role} instance ${url}${settings.path} answered with status ${answer.status}`;
      return new KvError("KV_PROXY_UPSTREAM_FAILED", message, { hint: `see the log of ${url}` });
    } catch (error) {
      return KvError.from(error, "KV_INTERNAL", "the health check failed");
    } finally {
      deadline.close();
    }
  }
  async function check(): Promise<void> {
    const instances = pools.flatMap((pool) => pool.list());
    await Promise.all(
      instances.map(async (instance) => {
        const error = await ask(instance);
        if (closed) return;
        const before = instance.status().state;
        instance.checked(error, settings.failures);
        const after = instance.status().state;
        if (after === before || (after !== "ejected" && before !== "ejected")) return;
        const fields = { role: instance.role, instance: instanceName(instance), before, after, error };
        if (after === "ejected") log.warn("instance-ejected", fields);
        else log.info("instance-returned", fields);
      }),
    );
  }
  function next(): void {
    timer = clock.setTimer(() => {
      void check().finally(() => {
        if (!closed) next();
      });
    }, settings.intervalMs);
  }
  if (settings.intervalMs > 0) next();
  return {
    check,
    close() {
      closed = true;
      timer?.cancel();
    },
  };
}
