import type { FailureStage, InstancePool, Partner, Role, RoutingContext } from "@kv/fleet";
import { KvError } from "@kv/interface";

/**
 * An instance answered something that is no valid answer. The error has no `stage`, so the leg is
 * not tried on another instance.
 */
export function badAnswer(role: Role, url: string, what: string, cause?: unknown): KvError {
  return new KvError("KV_PROXY_UPSTREAM_FAILED", `the ${role} instance ${url} ${what}`, {
    hint: `see the log of ${url}`,
    details: { role, instance: url },
    cause,
  });
}

/** Whether an error is `badAnswer`. */
export function isBadAnswer(error: unknown): boolean {
  return KvError.is(error, "KV_PROXY_UPSTREAM_FAILED") && error.details.stage === undefined;
}

/**
 * An instance answered with a server failure. The client gets that answer where no other instance
 * gives a better one.
 */
export function badStatus(role: Role, url: string, status: number): KvError {
  const stage: FailureStage = "status";
  return new KvError(
    "KV_PROXY_UPSTREAM_FAILED",
    `the ${role} instance ${url} answered with status ${status}`,
    { hint: `see the log of ${url}`, details: { role, instance: url, stage, status } },
  );
}

/**
 * Whether the server failed this time: a dead engine, a failed KV load, a gateway. A 501 would be
 * the same on another instance.
 */
export function isServerFailure(status: number): boolean {
  return status === 500 || status === 502 || status === 503 || status === 504;
}

/**
 * The status of an instance that does not have the model of a request, such as a LoRA adapter. Its
 * engine has not seen the request.
 */
export const MODEL_MISSING = 404;

/** Whether an error is `badStatus` of such an instance. */
export function isModelMissing(error: unknown): boolean {
  return error instanceof KvError && error.details.status === MODEL_MISSING;
}

/**
 * Whether the instance closed a connection that was kept from an earlier request, before it
 * answered.
 */
export function hadKeptConnection(error: unknown): boolean {
  return error instanceof KvError && error.details.keptConnection === true;
}

/** The lease of a request's blocks has ended before a decode leg began. */
export function leaseExpired(requestId: string): KvError {
  return new KvError(
    "KV_LEASE_EXPIRED",
    `no decode instance took request ${requestId} while the lease of its blocks lasted`,
    { hint: "raise kv_lease_duration on the prefill side, and timeouts.leaseMs here with it" },
  );
}

/** Why none of a pool's instances was chosen. */
export function noInstance(
  pool: InstancePool,
  partner?: Partner,
  context?: RoutingContext,
): KvError {
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

/**
 * Checked before a prefill leg whose decode leg could go nowhere.
 * @throws `KV_PROXY_NO_INSTANCE` when all instances are draining.
 */
export function requireAnyInstance(pool: InstancePool): void {
  if (pool.list().every(({ draining }) => draining)) throw noInstance(pool);
}
