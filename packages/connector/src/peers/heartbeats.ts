import type { Clock, Timer } from "@kv/interface";
import type { HeartbeatChange, HeartbeatRequest, RemoteRequest } from "../scheduler/step-types.js";
import type { TaskTracker } from "../worker/task-tracker.js";
import { addressOf, type EngineAddress, engineKey } from "./engine-address.js";
import type { NotificationSender } from "./notification-sender.js";
import type { PeerTable } from "./peer-table.js";
import type { RemoteEngine } from "./remote-engine.js";

/** A request of an engine in the set. */
interface Listed {
  readonly engine: ListedEngine;
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
interface ListedEngine {
  readonly address: EngineAddress;
  readonly requests: Map<string, Listed>;
}

/** The requests whose leases D extends. The workers get what has changed since the last step. */
export class HeartbeatSet {
  readonly #engines = new Map<string, ListedEngine>();
  /** Requests that came or went since the last `take`. */
  readonly #touched = new Set<Listed>();
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
    const changes = new Map<ListedEngine, { begin: HeartbeatRequest[]; end: HeartbeatRequest[] }>();
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
function heartbeatKey({ requestId, capability = "" }: HeartbeatRequest): string {
  return `${capability} ${requestId}`;
}

/** A request as heartbeats name it. */
function heartbeatRequest({ requestId, lease }: RemoteRequest): HeartbeatRequest {
  const capability = lease?.capability;
  return capability === undefined ? { requestId } : { requestId, capability };
}

/** Options of `HeartbeatSender`. */
export interface HeartbeatSenderOptions {
  /** Times the heartbeats. */
  readonly clock: Clock;
  /** vLLM 0.33: a sixth of the lease. */
  readonly intervalMs: number;
  /** The engines that heartbeats go to. One that is not open is opened. */
  readonly engines: Pick<PeerTable<RemoteEngine>, "acquire" | "peek">;
  /** Sends the heartbeats. */
  readonly notifications: Pick<NotificationSender, "sendHeartbeat">;
  /** Tracks the sending, so that the worker can wait for it when it closes. */
  readonly tasks: Pick<TaskTracker, "track">;
  /** Called after each heartbeat to an engine. `isDelivered`: the transport accepted it for all ranks. */
  readonly onSent?: ((engine: EngineAddress, isDelivered: boolean) => void) | undefined;
}

/** A request whose lease is extended. */
interface Extended extends HeartbeatRequest {
  /** When the transport got heartbeats that name the request, ascending. */
  readonly takenAtMs: number[];
}

/** The requests of one engine, by `heartbeatKey`. */
interface SentEngine {
  readonly address: EngineAddress;
  readonly requests: Map<string, Extended>;
}

/**
 * Extends the leases of the requests that wait or transfer on D: at each interval, it sends every engine the ids of its
 * requests. The scheduler side sends what changes. The timer runs between engine steps, so that an idle engine does not
 * lose its leases. Records which heartbeats the transport accepted, for the lease deadlines of P's that answer no lease queries.
 */
export class HeartbeatSender {
  readonly #options: HeartbeatSenderOptions;
  readonly #engines = new Map<string, SentEngine>();
  #timer: Timer | undefined;
  #lastMs = Number.NEGATIVE_INFINITY;

  constructor(options: HeartbeatSenderOptions) {
    this.#options = options;
  }

  /** Changes the set. New requests get a heartbeat at once when the last one is an interval old, otherwise with the next. */
  change(changes: readonly HeartbeatChange[]): void {
    for (const change of changes) this.#changeEngine(change);
    if (changes.length > 0) this.#arm();
  }

  /** When the transport got heartbeats that name the request and accepted them for all of the engine's ranks; in ms, ascending. */
  takenAtMs(remote: RemoteRequest): readonly number[] {
    const engine = this.#engines.get(engineKey(remote));
    return engine?.requests.get(heartbeatKey(heartbeatRequest(remote)))?.takenAtMs ?? [];
  }

  /** Requests whose leases are extended. */
  get size(): number {
    let size = 0;
    for (const { requests } of this.#engines.values()) size += requests.size;
    return size;
  }

  /** Sends no more heartbeats. */
  close(): void {
    this.#engines.clear();
    this.#arm();
  }

  /** As `close`. */
  [Symbol.dispose](): void {
    this.close();
  }

  #changeEngine(change: HeartbeatChange): void {
    const key = engineKey(change);
    const engine = this.#engines.get(key) ?? { address: addressOf(change), requests: new Map() };
    for (const request of change.begin)
      engine.requests.set(heartbeatKey(request), { ...request, takenAtMs: [] });
    for (const request of change.end) engine.requests.delete(heartbeatKey(request));
    if (engine.requests.size === 0) this.#engines.delete(key);
    else this.#engines.set(key, engine);
  }

  #arm(): void {
    const { clock, intervalMs } = this.#options;
    const dueInMs = this.#lastMs + intervalMs - clock.now();
    if (this.#engines.size === 0) this.#cancelTimer();
    else if (dueInMs > 0) this.#timer ??= clock.setTimer(() => this.#sendAll(), dueInMs);
    else this.#sendAll();
  }

  #sendAll(): void {
    const { clock, intervalMs } = this.#options;
    this.#cancelTimer();
    this.#lastMs = clock.now();
    for (const engine of this.#engines.values()) this.#send(engine);
    this.#timer = clock.setTimer(() => this.#sendAll(), intervalMs);
  }

  #send({ address, requests }: SentEngine): void {
    const { clock, engines, notifications, tasks, onSent } = this.#options;
    const engine = engines.peek(address);
    if (engine === undefined) {
      // The request may still be queued. A handshake now makes the next heartbeat possible, and saves time when the request's transfer starts.
      tasks.track(
        engines.acquire(address).then(
          (reference) => reference.release(),
          () => {},
        ),
      );
      return;
    }
    const atMs = clock.now();
    const named = [...requests.values()];
    tasks.track(
      notifications.sendHeartbeat(engine, named).then(({ takenIds, isDelivered }) => {
        onSent?.(address, isDelivered);
        const taken = new Set(takenIds);
        for (const { requestId, takenAtMs } of named) if (taken.has(requestId)) takenAtMs.push(atMs);
      }),
    );
  }

  #cancelTimer(): void {
    this.#timer?.cancel();
    this.#timer = undefined;
  }
}
