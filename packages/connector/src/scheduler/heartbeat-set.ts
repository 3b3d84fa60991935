import type { RequestProof } from "@kv/protocol";
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

/**
 * One order per engine. It names no registration of the engine's cache: heartbeats need no memory of the engine, and one request must not
 * decide for the others.
 */
function heartbeatOrders(requests: Iterable<RemoteRequest>): HeartbeatOrder[] {
  const byEngine = new Map<
    string,
    { engine: RemoteRequest; ids: Set<string>; proofs: Map<string, RequestProof> }
  >();
  for (const request of requests) {
    const key = engineKey(request);
    const entry = byEngine.get(key) ?? {
      engine: request,
      ids: new Set<string>(),
      proofs: new Map<string, RequestProof>(),
    };
    const { requestId, lease } = request;
    const { capability } = lease ?? {};
    entry.ids.add(requestId);
    if (capability !== undefined) entry.proofs.set(`${capability} ${requestId}`, { requestId, capability });
    byEngine.set(key, entry);
  }
  return [...byEngine.values()].map(({ engine, ids, proofs }) => ({
    engineId: engine.engineId,
    host: engine.host,
    port: engine.port,
    tpSize: engine.tpSize,
    dcpSize: engine.dcpSize,
    ppSize: engine.ppSize,
    remoteRequestIds: [...ids],
    ...(proofs.size === 0 ? {} : { proofs: [...proofs.values()] }),
  }));
}
