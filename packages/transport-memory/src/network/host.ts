import type { Clock, Random, Timer } from "@kv/interface";

/** A simulated process on a host of a memory network. */
export interface MemoryHost {
  readonly name: string;
  /** Counts the processes of this name, from 1. */
  readonly incarnation: number;
  readonly alive: boolean;
  /** The network's clock plus the host's skew. `kill` cancels its timers. */
  readonly clock: Clock;
  readonly random: Random;
  /**
   * Simulates SIGKILL: its memory, transfers, timers and listeners are gone, and its promises never
   * settle. A notification in flight arrives with the probability `deliverInFlight` (default: 0.5).
   * Then `network.host(name)` starts a new process.
   */
  kill(options?: { deliverInFlight?: number | undefined }): void;
  /** Calls `run` once at the kill. Returns a function that removes it. */
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
