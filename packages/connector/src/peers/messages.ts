import {
  type Agent,
  type Clock,
  KvError,
  type Log,
  type SideChannel,
  type Timer,
  YieldingQueue,
} from "@kv/interface";
import {
  decodeLeaseReply,
  decodeNotification,
  decodeNotificationInSteps,
  encodeLeaseQuery,
  encodeNotification,
  encodeRequestControl,
  isWireSafeRequestId,
  type KvNotification,
  type LeaseQuery,
  type LeaseReply,
  REQUEST_CONTROL,
} from "@kv/protocol";
import {
  addressOf,
  type EngineAddress,
  engineKey,
  type HeartbeatRequest,
  heartbeatKey,
  heartbeatRequest,
  type RemoteRequest,
} from "../requests/remote-request.js";
import type { HeartbeatChange } from "../requests/step-metadata.js";
import type { TaskTracker } from "./background-work.js";
import type { TransferMetrics } from "./transfers.js";

// Messages about requests to other engines and from them: notifications, heartbeats, lease queries.

/** Bytes of notifications that are read in one turn of the event loop, unless one has more. */
const TURN_BYTES = 64 * 1024;
/** Ids per heartbeat, far below any transport's limit for one notification. */
const HEARTBEAT_IDS = 256;

/** An open engine, as heartbeats need it. */
export interface HeartbeatTarget {
  readonly agents: ReadonlyMap<unknown, string>;
  readonly features: ReadonlySet<string>;
}

/** The outcome of sending a heartbeat. */
export interface HeartbeatResult {
  /** Requests whose heartbeat the transport accepted for every agent of the engine. */
  readonly takenIds: readonly string[];
  /**
   * Whether the transport accepted everything that was sent. False suggests that the engine is
   * gone.
   */
  readonly isDelivered: boolean;
}

/**
 * Sends a worker's notifications in the background. Methods do not throw. After a lost
 * notification, the peer waits for a lease or a deadline to end.
 */
export class NotificationSender {
  readonly #agent: Agent;
  readonly #log: Log;
  readonly #pending = new Set<Promise<boolean>>();

  constructor({ agent, log }: { readonly agent: Agent; readonly log: Log }) {
    this.#agent = agent;
    this.#log = log;
  }

  /**
   * Sends to an agent. Resolves with true when the transport accepted the notification, and with
   * false after a call of `failed`.
   */
  send(agentName: string, payload: Uint8Array, failed: (error: unknown) => void): Promise<boolean> {
    const sent = this.#notify(agentName, payload)
      .then(
        () => true,
        (error: unknown) => {
          failed(error);
          return false;
        },
      )
      .finally(() => this.#pending.delete(sent));
    this.#pending.add(sent);
    return sent;
  }

  /**
   * Sends a heartbeat for requests to all of an engine's agents: with capabilities to an `@kv`
   * engine, in vLLM's form otherwise. Ids that a peer would misparse (see `isWireSafeRequestId`)
   * are left out of vLLM's form: P does not extend their leases.
   */
  async sendHeartbeat(
    engine: HeartbeatTarget,
    named: readonly HeartbeatRequest[],
  ): Promise<HeartbeatResult> {
    const proven = engine.features.has(REQUEST_CONTROL)
      ? named.flatMap(({ requestId, capability }) =>
          capability === undefined ? [] : [{ requestId, capability }],
        )
      : [];
    const provenIds = new Set(proven.map(({ requestId }) => requestId));
    const plainIds = new Set(named.map(({ requestId }) => requestId));
    const plain = [...plainIds].filter((id) => !provenIds.has(id) && isWireSafeRequestId(id));
    const agents = [...new Set(engine.agents.values())];
    const messages = [
      ...inChunks(plain).map((requestIds) => ({
        requestIds,
        payload: encodeNotification({ kind: "heartbeat", requestIds }),
      })),
      ...inChunks(proven).map((requests) => ({
        requestIds: requests.map(({ requestId }) => requestId),
        payload: encodeRequestControl({ kind: "heartbeat", requests }),
      })),
    ];
    let isDelivered = true;
    const taken = await Promise.all(
      messages.map(async ({ requestIds, payload }) => {
        const sent = agents.map((name) =>
          this.send(name, payload, (error) =>
            this.#log.debug("heartbeat-failed", { agent: name, error: String(error) }),
          ),
        );
        const isTaken = (await Promise.all(sent)).every(Boolean);
        isDelivered &&= isTaken;
        return isTaken ? requestIds : [];
      }),
    );
    return { takenIds: taken.flat(), isDelivered };
  }

  /** Resolves when the transport has accepted or failed every notification so far. */
  async idle(): Promise<void> {
    while (this.#pending.size > 0) await Promise.all(this.#pending);
  }

  get size(): number {
    return this.#pending.size;
  }

  async #notify(agentName: string, payload: Uint8Array): Promise<void> {
    await this.#agent.notify(agentName, payload);
  }
}

function inChunks<T>(list: readonly T[]): (readonly T[])[] {
  const chunks: (readonly T[])[] = [];
  for (let i = 0; i < list.length; i += HEARTBEAT_IDS)
    chunks.push(list.slice(i, i + HEARTBEAT_IDS));
  return chunks;
}

/** Options of `HeartbeatSender`. */
export interface HeartbeatSenderOptions {
  readonly clock: Clock;
  readonly intervalMs: number;
  /** The engines that heartbeats go to. One that is not open is opened. */
  readonly engines: {
    open(address: EngineAddress): Promise<{ release(): void }>;
    peek(address: EngineAddress): HeartbeatTarget | undefined;
  };
  readonly notifications: Pick<NotificationSender, "sendHeartbeat">;
  /** Tracks the sending, so that the worker can wait for it when it closes. */
  readonly tasks: Pick<TaskTracker, "track">;
  /**
   * Called after each heartbeat to an engine. `isDelivered`: the transport accepted it for all
   * ranks.
   */
  readonly onSent?: ((engine: EngineAddress, isDelivered: boolean) => void) | undefined;
}

/** A request whose lease is extended. */
interface Extended extends HeartbeatRequest {
  readonly takenAtMs: number[];
}

/** The requests of one engine, by `heartbeatKey`. */
interface SentEngine {
  readonly address: EngineAddress;
  readonly requests: Map<string, Extended>;
}

/**
 * Extends the leases of the requests that wait or transfer on D: at each interval, it sends every
 * engine the ids of its requests. The scheduler side sends what changes. The timer runs between
 * engine steps, so that an idle engine does not lose its leases. Records which heartbeats the
 * transport accepted, for the lease deadlines of P's that answer no lease queries.
 */
export class HeartbeatSender {
  readonly #options: HeartbeatSenderOptions;
  readonly #engines = new Map<string, SentEngine>();
  #timer: Timer | undefined;
  #lastMs = Number.NEGATIVE_INFINITY;

  constructor(options: HeartbeatSenderOptions) {
    this.#options = options;
  }

  /**
   * Changes the set. New requests get a heartbeat at once when the last one is an interval old,
   * otherwise with the next.
   */
  change(changes: readonly HeartbeatChange[]): void {
    for (const change of changes) this.#changeEngine(change);
    if (changes.length > 0) this.#arm();
  }

  /**
   * When the transport got heartbeats that name the request and accepted them for all of the
   * engine's ranks; in ms, ascending.
   */
  takenAtMs(remote: RemoteRequest): readonly number[] {
    const engine = this.#engines.get(engineKey(remote));
    return engine?.requests.get(heartbeatKey(heartbeatRequest(remote)))?.takenAtMs ?? [];
  }

  get size(): number {
    let size = 0;
    for (const { requests } of this.#engines.values()) size += requests.size;
    return size;
  }

  close(): void {
    this.#engines.clear();
    this.#arm();
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
      // The request may still be queued. A handshake now makes the next heartbeat possible, and
      // saves time when the request's transfer starts.
      tasks.track(
        engines.open(address).then(
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
        for (const { requestId, takenAtMs } of named)
          if (taken.has(requestId)) takenAtMs.push(atMs);
      }),
    );
  }

  #cancelTimer(): void {
    this.#timer?.cancel();
    this.#timer = undefined;
  }
}

/**
 * Calls `handle` for each notification until the agent closes. A notification that cannot be
 * decoded, or that `handle` refuses by throwing, is logged and counted; nothing that a peer sends
 * ends the loop. Long ones are read in steps that take at most a quarter of the time.
 */
export function receiveNotifications(
  context: {
    readonly agent: Agent;
    readonly clock: Clock;
    readonly log: Log;
    readonly metrics: TransferMetrics;
  },
  handle: (notification: KvNotification, from: string) => void,
): void {
  const { agent, clock, log, metrics } = context;
  const long = new YieldingQueue({ clock, sliceMs: 0.5 });
  function* inSteps(payload: Uint8Array, from: string): Generator<undefined, void> {
    const notification = yield* decodeNotificationInSteps(payload);
    yield;
    handle(notification, from);
  }
  async function loop(): Promise<void> {
    let bytes = 0;
    for await (const { from, payload } of agent.notifications()) {
      bytes += payload.byteLength;
      try {
        // What has come is read in one turn of the event loop otherwise.
        if (bytes > TURN_BYTES) {
          bytes = 0;
          await long.run(inSteps(payload, from));
        } else handle(decodeNotification(payload), from);
      } catch (error) {
        metrics.notificationIgnored();
        log.warn("notification-refused", { from, error: String(error) });
      }
    }
  }
  loop().catch((error: unknown) => log.error("notifications-ended", { error: String(error) }));
}

/** Where a lease query goes. */
export interface QueryLeaseOptions {
  readonly sideChannel: SideChannel;
  readonly host: string;
  readonly port: number;
  readonly timeoutMs: number;
  readonly signal?: AbortSignal | undefined;
}

/**
 * Asks P whether it still holds a request's blocks. Asks again once when the first query or its
 * reply is lost.
 * @throws The errors of `SideChannel.request`; `KV_WIRE_MALFORMED` for a malformed reply.
 */
export async function queryLease(
  query: LeaseQuery,
  { sideChannel, ...options }: QueryLeaseOptions,
): Promise<LeaseReply> {
  const { host, port, signal } = options;
  for (let isSecondTry = false; ; isSecondTry = true) {
    try {
      const { frames } = await sideChannel.request({
        ...options,
        frames: [encodeLeaseQuery(query)],
      });
      const reply = decodeLeaseReply(frames);
      if (reply !== undefined) return reply;
      const where = `engine ${query.engineId} at ${host}:${port}`;
      const message = `${where} answered a lease query with ${frames.length} frames that are not a lease reply`;
      throw new KvError("KV_WIRE_MALFORMED", message);
    } catch (error) {
      if (isSecondTry || signal?.aborted) throw error;
    }
  }
}
