import type { Clock } from "@kv/interface";
import type { ProcessTimes } from "../ways.js";

type Process = keyof ProcessTimes;

/**
 * The cores of a host that all processes share. A process's JavaScript runs on one core at a time,
 * and work waits in the order in which it comes.
 */
export class Processors {
  readonly #clock: Clock;
  readonly #coresFreeAtMs: number[];
  readonly #processFreeAtMs = new Map<Process, number>();

  constructor(clock: Clock, cores: number) {
    this.#clock = clock;
    this.#coresFreeAtMs = Array.from({ length: cores }, () => 0);
  }

  /**
   * In how many milliseconds work of `workMs` on a process's JavaScript thread is done that begins
   * now.
   */
  doneInMs(process: Process, workMs: number): number {
    const nowMs = this.#clock.now();
    const readyAtMs = Math.max(nowMs, this.#processFreeAtMs.get(process) ?? 0);
    const endMs = this.#occupy(readyAtMs, workMs);
    this.#processFreeAtMs.set(process, endMs);
    return endMs - nowMs;
  }

  /**
   * Resolves when the process has done the work. `besideMs`: what its other threads do meanwhile,
   * for which it does not wait; they are first in the queue.
   */
  async work(process: Process, workMs: number, besideMs: number): Promise<void> {
    this.beside(besideMs);
    const waitMs = workMs > 0 ? this.doneInMs(process, workMs) : 0;
    if (waitMs > 0)
      await new Promise<void>(
        (resolve) => void this.#clock.setTimer(resolve, waitMs, { ref: true }),
      );
  }

  /** Other threads take a core for this time. */
  beside(workMs: number): void {
    if (workMs > 0) this.#occupy(this.#clock.now(), workMs);
  }

  /** When work ends that is ready then. */
  #occupy(readyAtMs: number, workMs: number): number {
    const cores = this.#coresFreeAtMs;
    // The core that is free just before; one that is free for longer is left to processes that are
    // ready now.
    const free = cores.filter((atMs) => atMs <= readyAtMs);
    const freeAtMs = free.length > 0 ? Math.max(...free) : Math.min(...cores);
    const core = cores.indexOf(freeAtMs);
    const endMs = Math.max(readyAtMs, freeAtMs) + workMs;
    cores[core] = endMs;
    return endMs;
  }
}
