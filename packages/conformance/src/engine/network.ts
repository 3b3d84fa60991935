import type { Agent, Clock, Notification, Random, SideChannel, Transport } from "@kv/interface";

/**
 * Where the engines of a scene run. `sceneNetwork` of `@kv/transport-memory` is one in virtual time,
 * which plays an equal scene equally.
 */
export interface SceneNetwork {
  readonly clock: Clock;
  /** Starts a process on a host, after a kill also under the same name. */
  start(hostName: string): SceneProcess;
  /** Lets time pass until the work has settled. */
  settle<T>(work: Promise<T>): Promise<T>;
  /** Lets `ms` milliseconds pass. */
  advance(ms: number): Promise<void>;
  /**
   * Counts what is held or in flight, such as timers, registrations and listeners: all zero when
   * every engine is closed or killed.
   */
  outstanding(): Readonly<Record<string, number>>;
}

/** One process of an engine. The suite closes transport and side channel. */
export interface SceneProcess {
  readonly clock: Clock;
  readonly random: Random;
  readonly transport: Transport;
  readonly sideChannel: SideChannel;
  /** As SIGKILL: its transfers, timers, memory and listeners are gone. */
  kill(): void | Promise<void>;
}

/** Chances, in [0, 1], of each notification that an engine receives. */
export interface NotificationFaults {
  readonly lost: number;
  readonly doubled: number;
  /** It comes up to `LATE_MS` later than it would, so that others overtake it. */
  readonly reordered: number;
}

const LATE_MS = 40;

export const NO_FAULTS: NotificationFaults = { lost: 0, doubled: 0, reordered: 0 };

/** The process's transport, whose agents lose, double and reorder what they receive. */
export function withNotificationFaults(
  { transport, clock, random }: SceneProcess,
  faultsNow: () => NotificationFaults,
): Transport {
  async function* notifications(agent: Agent): AsyncGenerator<Notification> {
    const ready: Notification[] = [];
    let wake = (): void => {};
    let isOver = false;
    const deliver = (notification: Notification): void => {
      ready.push(notification);
      wake();
    };
    void (async () => {
      for await (const notification of agent.notifications()) {
        const { lost, doubled, reordered } = faultsNow();
        const chance = random.next();
        if (chance < lost) continue;
        if (chance < lost + reordered)
          clock.setTimer(() => deliver(notification), random.next() * LATE_MS);
        else deliver(notification);
        if (random.next() < doubled)
          deliver({ ...notification, payload: notification.payload.slice() });
      }
      isOver = true;
      wake();
    })();

    for (;;) {
      const next = ready.shift();
      if (next !== undefined) yield next;
      else if (isOver) return;
      else
        await new Promise<void>((resolve) => {
          wake = resolve;
        });
    }
  }

  return changed(transport, {
    async createAgent(options) {
      const agent = await transport.createAgent(options);
      return changed(agent, { notifications: () => notifications(agent) });
    },
  });
}

/** `target`, which may be an instance of a class, with some methods replaced. */
function changed<T extends object>(target: T, methods: Partial<T>): T {
  return new Proxy(target, {
    get(_, key) {
      if (key in methods) return methods[key as keyof T];
      const value: unknown = target[key as keyof T];
      return typeof value === "function" ? value.bind(target) : value;
    },
  });
}
