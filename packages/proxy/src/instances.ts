import type { Clock, KvError } from "@kv/interface";
import type { Routing, RoutingContext } from "./routing.js";
import { failureStage, type Role } from "./upstream.js";

export interface Instance {
  readonly role: Role;
  readonly url: string;
  readonly inFlight: number;
  /** The rank of a data-parallel server that this instance stands for. */
  readonly dataParallelRank?: number;
}

export interface InstanceStatus {
  readonly url: string;
  /** It has not failed lately. */
  readonly available: boolean;
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

export interface InstancePool {
  readonly role: Role;
  readonly routing: string;
  /** Begins a visit at an instance that is not in `excluding`; undefined when there is none. */
  visit(context: RoutingContext, excluding: ReadonlySet<Instance>): Visit | undefined;
  available(): number;
  status(): InstanceStatus[];
}

export interface InstancePoolOptions {
  readonly role: Role;
  readonly urls: readonly string[];
  readonly routing: Routing;
  readonly clock: Clock;
  readonly coolDownMs: number;
}

export function createInstancePool({
  role,
  urls,
  routing,
  clock,
  coolDownMs,
}: InstancePoolOptions): InstancePool {
  const instances = urls.map((url) => ({
    role,
    url,
    inFlight: 0,
    requests: 0,
    failures: 0,
    consecutiveFailures: 0,
    availableAtMs: Number.NEGATIVE_INFINITY,
    lastError: undefined as KvError | undefined,
  }));
  type Known = (typeof instances)[number];
  const isAvailable = (instance: Known) => clock.now() >= instance.availableAtMs;

  function begin(instance: Known): Visit {
    let open = true;
    const end = (settle: () => void) => {
      if (!open) return;
      open = false;
      instance.inFlight--;
      settle();
    };
    instance.inFlight++;
    instance.requests++;
    return {
      instance,
      succeeded: () => end(() => (instance.consecutiveFailures = 0)),
      abandoned: () => end(() => {}),
      failed: (error) =>
        end(() => {
          instance.failures++;
          instance.consecutiveFailures++;
          instance.lastError = error;
          // An answer, even a bad one, shows that the instance is there.
          if (failureStage(error) !== undefined) instance.availableAtMs = clock.now() + coolDownMs;
        }),
    };
  }

  return {
    role,
    routing: routing.name,
    visit(context, excluding) {
      const left = instances.filter((instance) => !excluding.has(instance));
      const available = left.filter(isAvailable);
      // All cooling down: one of them may be back, and an attempt costs less than a refusal.
      const candidates = available.length > 0 ? available : left;
      if (candidates.length === 0) return undefined;
      const chosen = routing.choose(candidates, context);
      const instance = candidates.find((candidate) => candidate === chosen);
      return instance === undefined ? undefined : begin(instance);
    },
    available: () => instances.filter(isAvailable).length,
    status: () =>
      instances.map((instance) => ({
        url: instance.url,
        available: isAvailable(instance),
        in_flight: instance.inFlight,
        requests: instance.requests,
        failures: instance.failures,
        consecutive_failures: instance.consecutiveFailures,
        last_error: describe(instance.lastError),
      })),
  };
}

function describe(error: KvError | undefined): InstanceStatus["last_error"] {
  return error === undefined ? null : { code: error.code, message: error.message };
}
