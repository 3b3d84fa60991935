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
  type RequestProof,
} from "@kv/protocol";
import {
  addressOf,
  type EngineAddress,
  engineKey,
  type HeartbeatRequest,
  heartbeatKey,
  heartbeatRequest,
  type RemoteRequest,
} from "../requests/references.js";
import type { HeartbeatChange } from "../requests/step-metadata.js";
import { TaskTracker, type TransferMetrics } from "./transfers.js";

/** Read in one turn of the event loop, unless one notification is longer. */
const TURN_BYTES = 64 * 1024;
/** Keeps a heartbeat far below any transport's limit for a notification. */
const HEARTBEAT_IDS = 256;

export interface HeartbeatTarget {
  readonly agents: ReadonlyMap<unknown, string>;
  readonly features: ReadonlySet<string>;
}

export interface HeartbeatResult {
  /** Accepted by the transport for all of the engine's agents. */
  readonly takenIds: readonly string[];
  /** False suggests that the engine is gone. */
  readonly isDelivered: boolean;
}

/** Sends notifications in the background. A peer that misses one waits for a lease or deadline. */
export class NotificationSender {
  readonly #agent: Agent;
  readonly #log: Log;
  readonly #sending = new TaskTracker();

  constructor({ agent, log }: { readonly agent: Agent; readonly log: Log }) {
    this.#agent = agent;
    this.#log = log;
  }

  /** True when the transport accepted it; otherwise false, after `failed`. */
  send(agentName: string, payload: Uint8Array, failed: (error: unknown) => void): Promise<boolean> {
    const send = async () => {
      try {
        await this.#agent.notify(agentName, payload);
        return true;
      } catch (error) {
        failed(error);
        return false;
      }
    };
    const sent = send();
    this.#sending.track(sent);
    return sent;
  }

  /**
   * Sends to all of an engine's agents: with capabilities to `@kv`, otherwise in vLLM's form
   * without ids that vLLM would misparse.
   */
  async sendHeartbeat(
    engine: HeartbeatTarget,
    named: readonly HeartbeatRequest[],
  ): Promise<HeartbeatResult> {
    const proven: RequestProof[] = [];
    const plain = new Set<string>();
    for (const { requestId, capability } of named) {
      if (capability !== undefined && engine.features.has(REQUEST_CONTROL))
        proven.push({ requestId, capability });
      else if (isWireSafeRequestId(requestId)) plain.add(requestId);
    }
    for (const { requestId } of proven) plain.delete(requestId);
    const messages = [
      ...inChunks([...plain]).map((requestIds) => ({
        requestIds,
        payload: encodeNotification({ kind: "heartbeat", requestIds }),
      })),
      ...inChunks(proven).map((requests) => ({
        requestIds: requests.map(({ requestId }) => requestId),
        payload: encodeRequestControl({ kind: "heartbeat", requests }),
      })),
    ];
    const agents = [...new Set(engine.agents.values())];
    const taken = await Promise.all(
      messages.map(async ({ requestIds, payload }) => {
        const sent = agents.map((name) =>
          this.send(name, payload, (error) =>
            this.#log.debug("heartbeat-failed", { agent: name, error: String(error) }),
          ),
        );
        return (await Promise.all(sent)).every(Boolean) ? requestIds : undefined;
      }),
    );
    return {
      takenIds: taken.flatMap((ids) => ids ?? []),
      isDelivered: taken.every((ids) => ids !== undefined),
    };
  }

  idle(): Promise<void> {
    return this.#sending.idle();
  }

  get size(): number {
    return this.#sending.size;
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
  readonly engines: {
    open(address: EngineAddress): Promise<{ release(): void }>;
    peek(address: EngineAddress): HeartbeatTarget | undefined;
  };
  readonly notifications: Pick<NotificationSender, "sendHeartbeat">;
  readonly tasks: Pick<TaskTracker, "track">;
  /** `isDelivered`: the transport accepted it for all ranks. */
  readonly onSent?: ((engine: EngineAddress, isDelivered: boolean) => void) | undefined;
}

interface Extended extends HeartbeatRequest {
  readonly takenAtMs: number[];
}

interface SentEngine {
  readonly address: EngineAddress;
  readonly requests: Map<string, Extended>;
}

/**
 * Extends the leases of requests that wait or transfer on D. A timer sends the heartbeats between
 * engine steps, so that an idle engine keeps its leases.
 */
export class HeartbeatSender {
  readonly #options: HeartbeatSenderOptions;
  readonly #engines = new Map<string, SentEngine>();
  #timer: Timer | undefined;
  #lastMs = Number.NEGATIVE_INFINITY;

  constructor(options: HeartbeatSenderOptions) {
    this.#options = options;
  }

  /** A new request gets a heartbeat at once when the last one is an interval old. */
  change(changes: readonly HeartbeatChange[]): void {
    for (const change of changes) {
      const key = engineKey(change);
      const engine = this.#engines.get(key) ?? { address: addressOf(change), requests: new Map() };
      for (const request of change.begin)
        engine.requests.set(heartbeatKey(request), { ...request, takenAtMs: [] });
      for (const request of change.end) engine.requests.delete(heartbeatKey(request));
      if (engine.requests.size === 0) this.#engines.delete(key);
      else this.#engines.set(key, engine);
    }
    if (changes.length > 0) this.#arm();
  }

  /** Times in ms at which the transport took the request's heartbeats for all ranks; ascending. */
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
      // The next heartbeat needs the handshake, and so does the transfer.
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
 * Reads notifications until the agent closes. Bad ones are logged and counted, so nothing from a
 * peer ends the loop. Reading long ones takes at most a quarter of the time.
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

export interface QueryLeaseOptions {
  readonly sideChannel: SideChannel;
  readonly host: string;
  readonly port: number;
  readonly timeoutMs: number;
  readonly signal?: AbortSignal | undefined;
}

/**
 * Asks P whether it holds a request's blocks, and once more when a message is lost.
 * @throws The errors of `SideChannel.request`; `KV_WIRE_MALFORMED`.
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
