import type { HeartbeatOrder, RemoteRequest } from "./step-types.js";

/** Requests to keep alive, as one order per engine. */
export function heartbeatOrders(requests: Iterable<RemoteRequest>): HeartbeatOrder[] {
  const byEngine = new Map<string, { engine: RemoteRequest; ids: Set<string> }>();
  for (const remote of requests) {
    const entry = byEngine.get(remote.engineId) ?? { engine: remote, ids: new Set<string>() };
    // The newest word of the engine: an older registration would be shaken hands with in vain.
    if (remote.registrationGeneration > entry.engine.registrationGeneration) entry.engine = remote;
    entry.ids.add(remote.requestId);
    byEngine.set(remote.engineId, entry);
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
