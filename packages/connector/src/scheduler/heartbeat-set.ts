import { heartbeatOrders } from "./heartbeat-orders.js";
import type { HeartbeatOrder, RemoteRequest } from "./step-types.js";

/** The requests to keep alive as the workers were told last; they are told again when it has become another set. */
export interface HeartbeatSet {
  /** A request came, went, or changed: the set may be another one. */
  touch(): void;
  /** The set, if the workers do not know it yet. */
  untold(): HeartbeatOrder[] | null;
  take(): HeartbeatOrder[] | null;
  clear(): void;
  readonly size: number;
}

export function createHeartbeatSet(keptAlive: () => Iterable<RemoteRequest>): HeartbeatSet {
  let touched = false;
  let told = "[]";

  function untold(): HeartbeatOrder[] | null {
    if (!touched) return null;
    const orders = heartbeatOrders(keptAlive());
    touched = JSON.stringify(orders) !== told;
    return touched ? orders : null;
  }

  return {
    touch() {
      touched = true;
    },
    untold,
    take() {
      const orders = untold();
      if (orders !== null) told = JSON.stringify(orders);
      touched = false;
      return orders;
    },
    clear() {
      touched = false;
    },
    get size() {
      return [...keptAlive()].length;
    },
  };
}
