import type { Clock, Timer } from "@kv/interface";
import type { HeartbeatOrder } from "../scheduler/step-types.js";
import type { TaskTracker } from "../worker/task-tracker.js";
import { type EngineAddress, engineKey } from "./engine-address.js";
import type { NotificationSender } from "./notification-sender.js";
import type { PeerTable } from "./peer-table.js";
import type { RemoteEngine } from "./remote-engine.js";

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
  readonly onSent?: ((order: HeartbeatOrder, isDelivered: boolean) => void) | undefined;
}

/**
 * Extends the leases of the requests that wait or transfer on D: at each interval, it sends every engine the ids of its
 * requests. The scheduler side sends the whole set whenever it changes. The timer runs between engine steps, so that an idle engine does not
 * lose its leases. Records which heartbeats the transport accepted, for the lease deadlines of P's that answer no lease queries.
 */
export class HeartbeatSender {
  readonly #options: HeartbeatSenderOptions;
  #orders: readonly HeartbeatOrder[] = [];
  #timer: Timer | undefined;
  #lastMs = Number.NEGATIVE_INFINITY;
  /** By engine and request: when the transport got heartbeats that name the request, ascending. */
  readonly #takenAtMs = new Map<string, number[]>();

  constructor(options: HeartbeatSenderOptions) {
    this.#options = options;
  }

  /** Replaces the set. New requests get a heartbeat at once when the last one is an interval old, otherwise with the next. */
  replace(orders: readonly HeartbeatOrder[]): void {
    const kept = new Set(
      orders.flatMap((order) => order.remoteRequestIds.map((id) => requestKey(order, id))),
    );
    for (const known of this.#takenAtMs.keys()) if (!kept.has(known)) this.#takenAtMs.delete(known);
    for (const added of kept) if (!this.#takenAtMs.has(added)) this.#takenAtMs.set(added, []);
    this.#orders = orders.filter(({ remoteRequestIds }) => remoteRequestIds.length > 0);
    if (this.#orders.length === 0) {
      this.#cancelTimer();
      return;
    }
    const { clock, intervalMs } = this.#options;
    const dueInMs = this.#lastMs + intervalMs - clock.now();
    if (dueInMs <= 0) {
      this.#cancelTimer();
      this.#sendAll();
    } else {
      this.#timer ??= clock.setTimer(() => this.#sendAll(), dueInMs);
    }
  }

  /** When the transport got heartbeats that name the request and accepted them for all of the engine's ranks; in ms, ascending. */
  takenAtMs(engine: EngineAddress, remoteRequestId: string): readonly number[] {
    return this.#takenAtMs.get(requestKey(engine, remoteRequestId)) ?? [];
  }

  /** Requests whose leases are extended. */
  get size(): number {
    return this.#orders.reduce((sum, { remoteRequestIds }) => sum + remoteRequestIds.length, 0);
  }

  /** Sends no more heartbeats. */
  close(): void {
    this.#orders = [];
    this.#cancelTimer();
  }

  /** As `close`. */
  [Symbol.dispose](): void {
    this.close();
  }

  #sendAll(): void {
    this.#timer = undefined;
    if (this.#orders.length === 0) return;
    const { clock, intervalMs } = this.#options;
    this.#lastMs = clock.now();
    for (const order of this.#orders) this.#send(order);
    this.#timer = clock.setTimer(() => this.#sendAll(), intervalMs);
  }

  #send(order: HeartbeatOrder): void {
    const { clock, engines, notifications, tasks, onSent } = this.#options;
    const engine = engines.peek(order);
    if (engine === undefined) {
      // The request may still be queued. A handshake now makes the next heartbeat possible, and saves time when the request's transfer starts.
      tasks.track(
        engines.acquire(order).then(
          (reference) => reference.release(),
          () => {},
        ),
      );
      return;
    }
    const atMs = clock.now();
    tasks.track(
      notifications.sendHeartbeat(engine, order).then(({ takenIds, isDelivered }) => {
        onSent?.(order, isDelivered);
        for (const id of takenIds) this.#takenAtMs.get(requestKey(order, id))?.push(atMs);
      }),
    );
  }

  #cancelTimer(): void {
    this.#timer?.cancel();
    this.#timer = undefined;
  }
}

function requestKey(engine: EngineAddress, remoteRequestId: string): string {
  return `${engineKey(engine)} ${remoteRequestId}`;
}
