import type { Clock } from "@kv/interface";
import { createHeartbeats } from "./heartbeats.js";
import type { Peers } from "./peer-table.js";
import { addressOf } from "./acquire-peer.js";
import type { Messages } from "./notification-sender.js";
import type { HeartbeatOrder } from "../scheduler/step-types.js";
import type { RemoteLink } from "./remote-engine.js";

/** Heartbeats to the producers of the requests that wait or transfer here, and the memory of which ones went out. */
export interface KeepAlive {
  /** The set as the scheduler side has it now. */
  replace(orders: readonly HeartbeatOrder[]): void;
  /** When beats that name the request were taken by the transport, for all of the engine's ranks; ascending. */
  beatsAtMs(engineId: string, wireId: string): readonly number[];
  readonly size: number;
  close(): void;
}

export interface KeepAliveOptions {
  readonly clock: Clock;
  readonly intervalMs: number;
  readonly peers: Peers<RemoteLink>;
  readonly messages: Pick<Messages, "beat">;
  /** A beat to this engine was not taken by the transport, or was. */
  beaten?(order: HeartbeatOrder, taken: boolean): void;
  /** Takes work that nobody waits for, and that never rejects. */
  track(work: Promise<void>): void;
}

export function createKeepAlive({
  clock,
  intervalMs,
  peers,
  messages,
  beaten,
  track,
}: KeepAliveOptions): KeepAlive {
  const takenAtMs = new Map<string, number[]>();

  const heartbeats = createHeartbeats<HeartbeatOrder>({
    clock,
    intervalMs,
    beat(order) {
      const link = peers.peek(order.engineId);
      if (link === undefined) {
        // The request may be queued still: shaking hands now makes the next beat possible, and its read quicker.
        track(
          peers.acquire(addressOf(order)).then(
            (hold) => hold.release(),
            () => {},
          ),
        );
        return;
      }
      const atMs = clock.now();
      track(
        messages.beat(link, order.remoteRequestIds).then((taken) => {
          beaten?.(order, taken);
          if (!taken) return;
          for (const id of order.remoteRequestIds) takenAtMs.get(key(order.engineId, id))?.push(atMs);
        }),
      );
    },
  });

  return {
    replace(orders) {
      const kept = new Set(
        orders.flatMap(({ engineId, remoteRequestIds }) => remoteRequestIds.map((id) => key(engineId, id))),
      );
      for (const known of takenAtMs.keys()) if (!kept.has(known)) takenAtMs.delete(known);
      for (const added of kept) if (!takenAtMs.has(added)) takenAtMs.set(added, []);
      heartbeats.replace(orders);
    },
    beatsAtMs: (engineId, wireId) => takenAtMs.get(key(engineId, wireId)) ?? [],
    get size() {
      return heartbeats.size;
    },
    close: () => heartbeats.close(),
  };
}

function key(engineId: string, wireId: string): string {
  return JSON.stringify([engineId, wireId]);
}
