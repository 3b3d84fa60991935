import { engineKey } from "../peers/engine-address.js";
import type { HeartbeatOrder, RemoteRequest } from "./step-types.js";

/** The requests whose leases D extends. The workers get the whole set, and only when it has changed. */
export class HeartbeatSet {
  readonly #requests: () => Iterable<RemoteRequest>;
  #isTouched = false;
  /** The set that the workers have, as JSON. */
  #sent = "[]";

  /** `requests` lists the requests that wait or transfer now. */
  constructor(requests: () => Iterable<RemoteRequest>) {
    this.#requests = requests;
  }

  /** Records that a request was added, removed or changed, so that the set may differ. */
  touch(): void {
    this.#isTouched = true;
  }

  /** Whether the workers have an older set. */
  get hasChanged(): boolean {
    return this.#unsent() !== null;
  }

  /** Returns the set for the workers; null when they already have it. */
  take(): HeartbeatOrder[] | null {
    const orders = this.#unsent();
    if (orders !== null) this.#sent = JSON.stringify(orders);
    this.#isTouched = false;
    return orders;
  }

  /** Number of requests in the set. */
  get size(): number {
    let size = 0;
    for (const _ of this.#requests()) size += 1;
    return size;
  }

  /** Forgets that the set may have changed. */
  clear(): void {
    this.#isTouched = false;
  }

  #unsent(): HeartbeatOrder[] | null {
    if (!this.#isTouched) return null;
    const orders = heartbeatOrders(this.#requests());
    this.#isTouched = JSON.stringify(orders) !== this.#sent;
    return this.#isTouched ? orders : null;
  }
}

/** One order per engine, with the highest registration generation that a request names: an older one would cause a handshake that is outdated. */
function heartbeatOrders(requests: Iterable<RemoteRequest>): HeartbeatOrder[] {
  const byEngine = new Map<string, { engine: RemoteRequest; ids: Set<string> }>();
  for (const request of requests) {
    const key = engineKey(request);
    const entry = byEngine.get(key) ?? { engine: request, ids: new Set<string>() };
    if ((request.registrationGeneration ?? 0) > (entry.engine.registrationGeneration ?? 0))
      entry.engine = request;
    entry.ids.add(request.requestId);
    byEngine.set(key, entry);
  }
  return [...byEngine.values()].map(({ engine, ids }) => ({
    engineId: engine.engineId,
    host: engine.host,
    port: engine.port,
    tpSize: engine.tpSize,
    dcpSize: engine.dcpSize,
    ppSize: engine.ppSize,
    registrationGeneration: engine.registrationGeneration,
    remoteRequestIds: [...ids],
  }));
}
