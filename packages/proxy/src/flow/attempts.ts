import {
  failureStage,
  type Instance,
  type InstancePool,
  instanceName,
  type Partner,
  type RoutingContext,
  type Visit,
} from "@kv/fleet";
import type { Deadline } from "@kv/fleet/front-end";
import { KvError, type Log } from "@kv/interface";

const NONE: ReadonlySet<Instance> = new Set();

/**
 * What was tried for one part. Retries are decided by it. The rules: an instance that could not be reached has received nothing, so the next one
 * is tried as long as there is one. A prefill leg that broke off or was answered with a server failure is tried once more: it leaves at most leased
 * blocks behind (once, so that a request that crashes its worker does not crash all). A decode leg is never tried again with the same blocks, as
 * its worker may have told the prefill worker to free them; the part may begin again with the prefill leg, once.
 */
export class Attempts {
  /** Decode instances that failed; chosen again only when there is no other. */
  readonly failedDecode = new Set<Instance>();
  /** Prefill instances to avoid; chosen only when there is no other. */
  failedPrefill: ReadonlySet<Instance> = NONE;
  /** How often a prefill leg may be tried again after its request has left. */
  prefillRetries = 1;
  /** How often the part may begin again after its decode leg has failed. */
  restarts = 1;

  /** Whether a prefill leg may be tried again after this failure. */
  mayRetryPrefill(error: unknown): boolean {
    const stage = failureStage(error);
    return stage === "connect" || (stage !== undefined && this.prefillRetries > 0);
  }

  /** Whether the part may begin again after this failure of its decode leg. */
  mayRestart(error: unknown): boolean {
    const stage = failureStage(error);
    return this.restarts > 0 && stage !== undefined && stage !== "connect";
  }
}

export interface TryOptions {
  readonly pool: InstancePool;
  /** The request that instances are chosen for. */
  readonly context: RoutingContext;
  readonly deadline: Deadline;
  /** How often another instance is tried after a failure at which the request had left. */
  readonly retries: number;
  readonly log: Log;
  /** Instances that are chosen only when there is no other. */
  readonly avoid?: ReadonlySet<Instance> | undefined;
  /** Only instances that are its pair are chosen. */
  readonly partner?: Partner | undefined;
  /** Visits this instance and no other. */
  readonly only?: Visit | undefined;
}

/**
 * Runs a leg at one instance after another until it succeeds or may not be tried again. `leg` ends its visit when it succeeds; when it throws,
 * the visit is ended here. Errors: that of the last attempt, the deadline's reason, `KV_PROXY_NO_INSTANCE`.
 */
export async function tryInstances<T>(options: TryOptions, leg: (visit: Visit) => Promise<T>): Promise<T> {
  const { pool, deadline } = options;
  let tried = NONE;
  let failuresAfterSending = 0;
  let lastError: unknown;
  for (;;) {
    const visit = nextVisit(options, tried);
    if (visit === undefined) throw lastError ?? noInstance(pool, options.partner, options.context);
    try {
      return await leg(visit);
    } catch (error) {
      if (deadline.aborted) {
        visit.abandoned();
        throw deadline.reason;
      }
      lastError = error;
      tried = new Set([...tried, visit.instance]);
      visit.failed(KvError.from(error, "KV_INTERNAL", `the ${pool.role} leg failed`));
      const stage = failureStage(error);
      if (stage !== "connect") failuresAfterSending += 1;
      const again = stage === "connect" || (stage !== undefined && failuresAfterSending <= options.retries);
      const { requestId } = options.context;
      options.log.warn("leg-failed", {
        requestId,
        role: pool.role,
        instance: instanceName(visit.instance),
        again,
        error,
      });
      if (!again) throw error;
    }
  }
}

function nextVisit(
  { pool, context, avoid, only, partner }: TryOptions,
  tried: ReadonlySet<Instance>,
): Visit | undefined {
  if (only !== undefined) return tried.has(only.instance) ? undefined : only;
  const preferred =
    avoid === undefined || avoid.size === 0
      ? undefined
      : pool.visit(context, new Set([...tried, ...avoid]), partner);
  return preferred ?? pool.visit(context, tried, partner);
}

/** Errors: `KV_PROXY_NO_INSTANCE` when all instances are draining. Checked before a prefill leg whose decode leg could go nowhere. */
export function requireAnyInstance(pool: InstancePool): void {
  if (pool.list().every(({ draining }) => draining)) throw noInstance(pool);
}

function noInstance(pool: InstancePool, partner?: Partner, context?: RoutingContext): KvError {
  const { role, routing } = pool;
  const named = role === "prefill" ? context?.prefillers : undefined;
  const all = named ?? pool.list();
  const hint = "add one by discovery or POST /instances/add, which also puts a draining one back";
  const error = (message: string) => new KvError("KV_PROXY_NO_INSTANCE", message, { hint });
  if (all.length === 0) return error(`there is no ${role} instance`);
  if (all.every(({ draining }) => draining))
    return error(`no ${role} instance takes requests: all ${all.length} are draining`);
  const misfit = partner === undefined ? undefined : pool.pairingRefusal(partner, named);
  if (misfit !== undefined) {
    const other = role === "prefill" ? "a decode instance" : "the prefill instance of the request";
    return new KvError("KV_PROXY_NO_INSTANCE", `no ${role} instance fits ${other}: ${misfit}`, {
      hint: "run engines with equal compatibility hashes and sizes on both sides; GET /status of the admin port shows each instance's pairing",
      details: { pairing: true },
    });
  }
  return error(`the routing ${routing} chose none of the ${all.length} ${role} instances`);
}
