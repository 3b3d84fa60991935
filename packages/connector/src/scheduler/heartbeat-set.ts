import { addressOf, type EngineAddress, engineKey } from "../peers/engine-address.js";
import type { HeartbeatChange, HeartbeatRequest, RemoteRequest } from "./step-types.js";

/** A request of an engine in the set. */
interface Extended {
  readonly engine: Engine;
  readonly request: HeartbeatRequest;
  /** How many of D's requests name it: a client may send one answer of P twice. */
  count: number;
  /** Whether the workers have it. */
  isSent: boolean;
}

/**
 * The address names no registration of the engine's cache: heartbeats need no memory of the engine, and one request must not decide for the
 * others.
 */
interface Engine {
  readonly address: EngineAddress;
  readonly requests: Map<string, Extended>;
}

/** The requests whose leases D extends. The workers get what has changed since the last step. */
export class HeartbeatSet {
  readonly #engines = new Map<string, Engine>();
  /** Requests that came or went since the last `take`. */
  readonly #touched = new Set<Extended>();
  #size = 0;

  /** Adds a request that waits or transfers. */
  add(remote: RemoteRequest): void {
    const key = engineKey(remote);
    let engine = this.#engines.get(key);
    if (engine === undefined) {
      engine = { address: addressOf(remote), requests: new Map() };
      this.#engines.set(key, engine);
    }
    const request = heartbeatRequest(remote);
    const name = heartbeatKey(request);
    let extended = engine.requests.get(name);
    if (extended === undefined) {
      extended = { engine, request, count: 0, isSent: false };
      engine.requests.set(name, extended);
    }
    extended.count += 1;
    this.#size += 1;
    this.#touched.add(extended);
  }

  /** Removes a request that was added. */
  remove(remote: RemoteRequest): void {
    const engine = this.#engines.get(engineKey(remote));
    const extended = engine?.requests.get(heartbeatKey(heartbeatRequest(remote)));
    if (extended === undefined || extended.count === 0) return;
    extended.count -= 1;
    this.#size -= 1;
    this.#touched.add(extended);
  }

  /** Whether the workers have an older set. */
  get hasChanged(): boolean {
    for (const { count, isSent } of this.#touched) if (count > 0 !== isSent) return true;
    return false;
  }

  /** Returns the changes since the last call, one entry per engine. */
  take(): HeartbeatChange[] {
    const changes = new Map<Engine, { begin: HeartbeatRequest[]; end: HeartbeatRequest[] }>();
    for (const extended of this.#touched) {
      const { engine, request, count, isSent } = extended;
      if (count > 0 !== isSent) {
        const change = changes.get(engine) ?? { begin: [], end: [] };
        changes.set(engine, change);
        change[isSent ? "end" : "begin"].push(request);
        extended.isSent = !isSent;
      }
      if (count > 0) continue;
      engine.requests.delete(heartbeatKey(request));
      if (engine.requests.size === 0) this.#engines.delete(engineKey(engine.address));
    }
    this.#touched.clear();
    return [...changes].map(([{ address }, change]) => ({ ...address, ...change }));
  }

  /** Number of requests in the set. */
  get size(): number {
    return this.#size;
  }

  /** Forgets all requests. */
  clear(): void {
    this.#engines.clear();
    this.#touched.clear();
    this.#size = 0;
  }
}

/** Identifies a request of an engine. One id may come with several capabilities, of which only one is right. */
export function heartbeatKey({ requestId, capability = "" }: HeartbeatRequest): string {
  return `${capability} ${requestId}`;
}

/** A request as heartbeats name it. */
export function heartbeatRequest({ requestId, lease }: RemoteRequest): HeartbeatRequest {
  const capability = lease?.capability;
  return capability === undefined ? { requestId } : { requestId, capability };
}
