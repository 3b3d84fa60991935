import {
  type FailureStage,
  failureStage,
  type Instance,
  type InstancePool,
  type Partner,
  type RoutingContext,
} from "@kv/fleet";
import { KvError } from "@kv/interface";

/**
 * What went wrong at an instance. `unreachable`: it received nothing. `kept`: it closed a
 * connection kept from an earlier request, and may be well. `lacks-model`: others may have the
 * model, such as a LoRA adapter; no failure. `refused`: others may not answer so (a wrong key, too
 * many requests, HTML); its failure if another one answers. `busy`: it, or a gateway before it,
 * does not serve now. `broken`: it broke off or failed, perhaps because of the request.
 */
export type Fault = "unreachable" | "kept" | "lacks-model" | "refused" | "busy" | "broken";

const OF_STATUS: Readonly<Record<number, Fault>> = {
  401: "refused",
  403: "refused",
  404: "lacks-model",
  429: "refused",
  500: "broken",
  502: "busy",
  503: "busy",
  504: "busy",
};

/** Returns undefined for a status that the client gets unchanged. */
export function faultOfStatus(status: number): Fault | undefined {
  return OF_STATUS[status];
}

/** Returns undefined where no other instance would do better. */
export function faultOf(error: KvError): Fault | undefined {
  switch (failureStage(error)) {
    case "connect":
      return "unreachable";
    case "answer":
      return isKept(error) ? "kept" : "broken";
    case "body":
      return "broken";
    case "status":
      return "refused";
    default:
      return undefined;
  }
}

export function isKept(error: unknown): boolean {
  return error instanceof KvError && error.details.keptConnection === true;
}

function upstreamFailed(
  { role, url }: Instance,
  what: string,
  details: { readonly stage?: FailureStage; readonly status?: number },
  cause?: unknown,
): KvError {
  return new KvError("KV_PROXY_UPSTREAM_FAILED", `the ${role} instance ${url} ${what}`, {
    hint: `see the log of ${url}`,
    details: { role, instance: url, ...details },
    cause,
  });
}

export function badAnswer(instance: Instance, what: string, cause?: unknown): KvError {
  return upstreamFailed(instance, what, { stage: "status" }, cause);
}

export function isBadAnswer(error: unknown): boolean {
  return failureStage(error) === "status";
}

/** An answer too long here would be too long at another instance. */
export function tooLong(instance: Instance, what: string): KvError {
  return upstreamFailed(instance, `answered with more than ${what}`, {});
}

export function badStatus(instance: Instance, status: number): KvError {
  return upstreamFailed(instance, `answered with status ${status}`, { stage: "status", status });
}

export function leaseExpired(requestId: string): KvError {
  return new KvError(
    "KV_LEASE_EXPIRED",
    `no decode instance took request ${requestId} while the lease of its blocks lasted`,
    { hint: "raise kv_lease_duration on the prefill side, and timeouts.leaseMs here with it" },
  );
}

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
 * Checked before a prefill leg that could have no decode leg.
 * @throws `KV_PROXY_NO_INSTANCE` when all instances are draining.
 */
export function requireAnyInstance(pool: InstancePool): void {
  if (pool.list().every(({ draining }) => draining)) throw noInstance(pool);
}
