import { type Clock, KvError, type Random, type Timer } from "@kv/interface";
import type { AgentEndpoint, PostedNotification } from "./endpoints.js";
import { DEFAULT_FAULT_DELAY_MS, type FaultPlan } from "./fault-plan.js";
import type { MemoryHost } from "./host.js";

/** The part of `Fabric` that notifications need. */
interface NotificationFabric {
  readonly clock: Clock;
  readonly random: Random;
  readonly faults: FaultPlan;
  readonly reportsPeerDeath: boolean;
  readonly agents: ReadonlyMap<string, AgentEndpoint>;
  drawLatencyMs(): number;
  isCut(hostA: string, hostB: string): boolean;
  cut(hostA: string, hostB: string, forMs: number | undefined): void;
}

interface InFlightNotification extends PostedNotification {
  timer: Timer;
}

interface Channel {
  /** Notifications that keep their order. */
  readonly queue: InFlightNotification[];
  /** Arrival of the last one. */
  lastAtMs: number;
}

/**
 * Notifications in flight: one channel for each pair of agents, first in, first out unless a fault
 * reorders.
 */
export class NotificationChannels {
  readonly #fabric: NotificationFabric;
  readonly #channels = new Map<string, Channel>();
  readonly #inFlight = new Set<InFlightNotification>();

  constructor(fabric: NotificationFabric) {
    this.#fabric = fabric;
  }

  get inFlight(): number {
    return this.#inFlight.size;
  }

  /**
   * Sends a notification. Returns an error when the transport can know that the notification will
   * not arrive.
   */
  post(notification: PostedNotification): KvError | undefined {
    const fabric = this.#fabric;
    const { from, to, payload } = notification;
    const rule = fabric.faults.decide({
      operation: "NOTIFY",
      from: from.host.name,
      fromAgent: from.name,
      to: to.host,
      toAgent: to.name,
      lengthBytes: payload.length,
      payload,
    });
    if (rule?.fault === "disconnect") fabric.cut(from.host.name, to.host, rule.forMs);
    if (rule?.fault === "fail") return notSent(notification, "an injected fault");
    if (fabric.isCut(from.host.name, to.host))
      return notSent(notification, "the hosts are disconnected");
    if (!fabric.agents.has(to.incarnation)) {
      return fabric.reportsPeerDeath ? notSent(notification, "the peer is gone") : undefined;
    }
    if (rule?.fault === "drop") return undefined;
    const extraMs = rule?.delayMs ?? DEFAULT_FAULT_DELAY_MS;
    if (rule?.fault === "reorder") this.#sendOutOfOrder(notification, extraMs);
    else this.#sendInOrder(notification, rule?.fault === "delay" ? extraMs : 0);
    if (rule?.fault === "duplicate") this.#sendInOrder(notification, 0);
    return undefined;
  }

  /**
   * Drops each notification in flight from `host`, except with the probability `deliverInFlight`.
   */
  hostKilled(host: MemoryHost, deliverInFlight: number): void {
    for (const notification of [...this.#inFlight]) {
      if (notification.from.host === host && this.#fabric.random.next() >= deliverInFlight) {
        this.#drop(notification);
      }
    }
  }

  #sendInOrder(notification: PostedNotification, extraMs: number): void {
    const { clock } = this.#fabric;
    const key = `${notification.from.incarnation} ${notification.to.incarnation}`;
    const channel = this.#channels.get(key) ?? { queue: [], lastAtMs: 0 };
    this.#channels.set(key, channel);
    const nowMs = clock.now();
    channel.lastAtMs = Math.max(nowMs + this.#fabric.drawLatencyMs() + extraMs, channel.lastAtMs);
    const timer = clock.setTimer(
      () => {
        // Deliver the head of the queue: real timers of different lengths may fire out of order by
        // a millisecond.
        const head = channel.queue.shift();
        if (channel.queue.length === 0) this.#channels.delete(key);
        if (head !== undefined) this.#deliver(head);
      },
      channel.lastAtMs - nowMs,
      { ref: true },
    );
    const sent: InFlightNotification = { ...notification, timer };
    channel.queue.push(sent);
    this.#inFlight.add(sent);
  }

  #sendOutOfOrder(notification: PostedNotification, extraMs: number): void {
    const { clock } = this.#fabric;
    const timer = clock.setTimer(
      () => this.#deliver(sent),
      this.#fabric.drawLatencyMs() + extraMs,
      {
        ref: true,
      },
    );
    const sent: InFlightNotification = { ...notification, timer };
    this.#inFlight.add(sent);
  }

  #deliver(notification: InFlightNotification): void {
    this.#inFlight.delete(notification);
    const { from, to, payload } = notification;
    if (this.#fabric.isCut(from.host.name, to.host)) return;
    this.#fabric.agents.get(to.incarnation)?.deliver({ from: from.name, payload: payload.slice() });
  }

  #drop(notification: InFlightNotification): void {
    notification.timer.cancel();
    this.#inFlight.delete(notification);
    for (const [key, { queue }] of this.#channels) {
      const index = queue.indexOf(notification);
      if (index >= 0) queue.splice(index, 1);
      if (queue.length === 0) this.#channels.delete(key);
    }
  }
}

function notSent({ from, to, payload }: PostedNotification, reason: string): KvError {
  return new KvError(
    "KV_NOTIFICATION_FAILED",
    `a notification of ${payload.length} bytes from agent ${from.name} to ${to.name} failed: ${reason}`,
  );
}
