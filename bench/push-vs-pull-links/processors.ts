import type { Clock } from "@kv/interface";
import type { PROCESSES } from "../push-vs-pull/deployments.js";

type Process = (typeof PROCESSES)[number];

/** The cores of a host that all processes share. A process runs on one core at a time, and work waits in the order in which it comes. */
export class Processors {
  readonly #clock: Clock;
  readonly #coresFreeAtMs: number[];
  readonly #processFreeAtMs = new Map<Process, number>();

  constructor(clock: Clock, cores: number) {
    this.#clock = clock;
    this.#coresFreeAtMs = Array.from({ length: cores }, () => 0);
  }

  /** In how many milliseconds work of `workMs` is done that a process begins now. */
  doneInMs(process: Process, workMs: number): number {
    const nowMs = this.#clock.now();
    const readyAtMs = Math.max(nowMs, this.#processFreeAtMs.get(process) ?? 0);
    const cores = this.#coresFreeAtMs;
    // The core that is free just before; one that is free for longer is left to processes that are ready now.
    const free = cores.filter((atMs) => atMs <= readyAtMs);
    const freeAtMs = free.length > 0 ? Math.max(...free) : Math.min(...cores);
    const core = cores.indexOf(freeAtMs);
    const beginMs = Math.max(readyAtMs, freeAtMs);
    this.#coresFreeAtMs[core] = beginMs + workMs;
    this.#processFreeAtMs.set(process, beginMs + workMs);
    return beginMs + workMs - nowMs;
  }

  /** Resolves when the process has done the work. */
  async work(process: Process, workMs: number): Promise<void> {
    if (workMs <= 0) return;
    const waitMs = this.doneInMs(process, workMs);
    await new Promise<void>((resolve) => void this.#clock.setTimer(resolve, waitMs, { ref: true }));
  }
}
