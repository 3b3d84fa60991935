import { KvError, type Log } from "@kv/interface";
import { whyEnded } from "./deadline.js";
import type { Instance, Visit } from "./instance.js";
import type { InstancePool } from "./instances.js";
import type { Part } from "./leg-order.js";
import { failedAttempt, type RetryPolicy } from "./retry.js";
import { failureStage } from "./upstream.js";

export interface AttemptOptions {
  readonly pool: InstancePool;
  readonly retry: RetryPolicy;
  readonly log: Log;
}

const NONE: ReadonlySet<Instance> = new Set();

type Caller = Pick<Part, "requestId" | "deadline"> &
  Partial<Pick<Part, "request" | "headers" | "preferredPrefill">>;

/**
 * Runs a leg on an instance, and on others while the retry policy allows it. `leg` ends its visit when it succeeds; when it throws,
 * the visit is ended here. Instances in `avoid` come last. Errors: the last attempt's, the deadline's reason, `KV_PROXY_NO_INSTANCE`.
 */
export async function onSomeInstance<T>(
  { pool, retry, log }: AttemptOptions,
  caller: Caller,
  leg: (visit: Visit) => Promise<T>,
  avoid = NONE,
): Promise<T> {
  const { requestId, deadline } = caller;
  let tried = NONE;
  let begun = 0;
  let last: unknown;
  for (;;) {
    const unavoided = avoid.size === 0 ? undefined : pool.visit(caller, new Set([...tried, ...avoid]));
    const visit = unavoided ?? pool.visit(caller, tried);
    if (visit === undefined) throw last ?? noInstance(pool);
    try {
      return await leg(visit);
    } catch (error) {
      if (deadline.ended) {
        visit.abandoned();
        throw whyEnded(deadline, error);
      }
      last = error;
      tried = new Set([...tried, visit.instance]);
      visit.failed(KvError.from(error, "KV_INTERNAL", `the ${pool.role} leg failed`));
      if (failureStage(error) !== "connect") begun += 1;
      const again = retry.again(failedAttempt(pool.role, error, Math.max(1, begun)));
      log.warn("leg-failed", { requestId, role: pool.role, instance: visit.instance.url, again, error });
      if (!again) throw error;
    }
  }
}

/** Errors: `KV_PROXY_NO_INSTANCE` where no instance would be asked at all: what is done for it would be done for nothing. */
export function refuseNobody(pool: InstancePool): void {
  if (pool.list().every(({ draining }) => draining)) throw noInstance(pool);
}

function noInstance(pool: InstancePool): KvError {
  const { role, routing } = pool;
  const all = pool.list();
  const hint = "add one (discovery, or POST /instances/add, which also takes one back that is draining)";
  const none = (message: string) => new KvError("KV_PROXY_NO_INSTANCE", message, { hint });
  if (all.length === 0) return none(`there is no ${role} instance`);
  if (all.every(({ draining }) => draining))
    return none(`no ${role} instance takes requests: all ${all.length} are draining`);
  return none(`the routing ${routing} chose none of the ${all.length} ${role} instances`);
}
