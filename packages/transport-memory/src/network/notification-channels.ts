import { KvError, type Timer } from "@kv/interface";
import type { Fabric, PostedNotification } from "./fabric.js";
import { DEFAULT_FAULT_DELAY_MS } from "./fault-plan.js";
import type { MemoryHost } from "./host.js";

interface Flight extends PostedNotification {
  timer: Timer;
}

interface Channel {
  /** Those that keep their order. */
  readonly queue: Flight[];
  lastAtMs: number;
}

export interface NotificationChannels {
  readonly inFlight: number;
  post(notification: PostedNotification): KvError | undefined;
  /** Each notification of `host` that is under way is lost, but for the chance given. */
  hostKilled(host: MemoryHost, deliverInFlight: number): void;
  close(): void;
}

/** One channel per pair of agents, first in first out unless a fault says otherwise. */
export function notificationChannels(fabric: Fabric): NotificationChannels {
  const channels = new Map<string, Channel>();
  const flights = new Set<Flight>();

  function deliver(flight: Flight): void {
    flights.delete(flight);
    if (fabric.isCut(flight.from.host.name, flight.to.host)) return;
    fabric.agents
      .get(flight.to.incarnation)
      ?.deliver({ from: flight.from.name, payload: flight.payload.slice() });
  }

  function flyInOrder(notification: PostedNotification, extraMs: number): void {
    const key = `${notification.from.incarnation} ${notification.to.incarnation}`;
    const channel = channels.get(key) ?? { queue: [], lastAtMs: 0 };
    channels.set(key, channel);
    const nowMs = fabric.clock.now();
    channel.lastAtMs = Math.max(nowMs + fabric.drawLatencyMs() + extraMs, channel.lastAtMs);
    const timer = fabric.clock.setTimer(
      () => {
        // The head, not this one: real timers of different lengths may fire out of order by a millisecond.
        const head = channel.queue.shift();
        if (channel.queue.length === 0) channels.delete(key);
        if (head !== undefined) deliver(head);
      },
      channel.lastAtMs - nowMs,
      { ref: true },
    );
    const flight: Flight = { ...notification, timer };
    channel.queue.push(flight);
    flights.add(flight);
  }

  function flyAlone(notification: PostedNotification, extraMs: number): void {
    const timer = fabric.clock.setTimer(() => deliver(flight), fabric.drawLatencyMs() + extraMs, {
      ref: true,
    });
    const flight: Flight = { ...notification, timer };
    flights.add(flight);
  }

  function lose(flight: Flight): void {
    flight.timer.cancel();
    flights.delete(flight);
    for (const [key, { queue }] of channels) {
      const index = queue.indexOf(flight);
      if (index >= 0) queue.splice(index, 1);
      if (queue.length === 0) channels.delete(key);
    }
  }

  function refused(notification: PostedNotification, reason: string): KvError {
    const { from, to } = notification;
    const message = `a notification of ${notification.payload.length} bytes from agent ${from.name} to ${to.name} failed: ${reason}`;
    return new KvError("KV_NOTIFICATION_FAILED", message);
  }

  return {
    get inFlight() {
      return flights.size;
    },
    post(notification) {
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
      if (rule?.fault === "fail") return refused(notification, "an injected fault");
      if (fabric.isCut(from.host.name, to.host)) return refused(notification, "the hosts are disconnected");
      if (!fabric.agents.has(to.incarnation)) {
        return fabric.reportsPeerDeath ? refused(notification, "the peer is gone") : undefined;
      }
      if (rule?.fault === "drop") return undefined;
      const extraMs = rule?.delayMs ?? DEFAULT_FAULT_DELAY_MS;
      if (rule?.fault === "reorder") flyAlone(notification, extraMs);
      else flyInOrder(notification, rule?.fault === "delay" ? extraMs : 0);
      if (rule?.fault === "duplicate") flyInOrder(notification, 0);
      return undefined;
    },
    hostKilled(host, deliverInFlight) {
      for (const flight of [...flights]) {
        if (flight.from.host === host && fabric.random.next() >= deliverInFlight) lose(flight);
      }
    },
    close() {
      for (const flight of [...flights]) lose(flight);
    },
  };
}
