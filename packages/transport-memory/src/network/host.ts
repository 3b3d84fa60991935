import type { Clock, Random, Timer } from "@kv/interface";

/** A process on a machine of a memory network: what dies with SIGKILL. */
export interface MemoryHost {
  readonly name: string;
  /** 1 for the first process of this name, 2 for the one after a `kill`, and so on. */
  readonly incarnation: number;
  readonly alive: boolean;
  /** The network's clock, off by the host's skew. Its timers are gone when the host is killed. */
  readonly clock: Clock;
  /** A stream of its own. */
  readonly random: Random;
  /**
   * Simulates SIGKILL: its memory can no longer be read or written, its transfers stop where they are, its timers and
   * listeners are gone, and its promises never settle. Of its notifications in flight each still arrives with the chance
   * `deliverInFlight` (0.5 by default). `network.host(name)` then makes the process that follows it.
   */
  kill(options?: { deliverInFlight?: number }): void;
  /** Called once when the host is killed, in the order of the calls. Answers how to take it back. */
  onKill(run: () => void): () => void;
}

export interface HostOptions {
  readonly name: string;
  readonly incarnation: number;
  readonly clock: Clock;
  readonly random: Random;
  readonly skewMs: number;
  readonly killed: (host: MemoryHost, deliverInFlight: number) => void;
}

export function memoryHost(options: HostOptions): MemoryHost {
  const { clock, skewMs } = options;
  let alive = true;
  const timers = new Set<Timer>();
  const listeners = new Set<() => void>();

  const host: MemoryHost = {
    name: options.name,
    incarnation: options.incarnation,
    random: options.random,
    get alive() {
      return alive;
    },
    clock: {
      now: () => clock.now() + skewMs,
      setTimer(run, delayMs, timerOptions) {
        if (!alive) return { cancel() {} };
        const timer = clock.setTimer(
          () => {
            timers.delete(timer);
            run();
          },
          delayMs,
          timerOptions,
        );
        timers.add(timer);
        return {
          cancel() {
            timers.delete(timer);
            timer.cancel();
          },
        };
      },
    },
    kill({ deliverInFlight = 0.5 } = {}) {
      if (!alive) return;
      alive = false;
      for (const timer of timers) timer.cancel();
      timers.clear();
      for (const run of [...listeners]) run();
      listeners.clear();
      options.killed(host, deliverInFlight);
    },
    onKill(run) {
      listeners.add(run);
      return () => void listeners.delete(run);
    },
  };
  return host;
}
