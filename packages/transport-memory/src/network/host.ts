import type { Clock, Random, Timer } from "@kv/interface";

/** A simulated process on a host of a memory network. */
export interface MemoryHost {
  /** Name of the host. */
  readonly name: string;
  /** 1 for the first process of this name, 2 for the one after a `kill`, and so on. */
  readonly incarnation: number;
  /** False after `kill`. */
  readonly alive: boolean;
  /** The network's clock plus the host's skew. `kill` cancels its timers. */
  readonly clock: Clock;
  /** A stream of random numbers of its own. */
  readonly random: Random;
  /**
   * Simulates SIGKILL: peers can no longer read or write the process's memory, its transfers stop,
   * its timers and listeners are gone, and its promises never settle. Each of its notifications in
   * flight still arrives with the probability `deliverInFlight` (default: 0.5). Afterwards
   * `network.host(name)` starts the next process of that name.
   */
  kill(options?: { deliverInFlight?: number | undefined }): void;
  /**
   * Adds a listener that is called once when the process is killed, in the order of addition.
   * Returns a function that removes it.
   */
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
