import cluster, { type Worker } from "node:cluster";
import { createServer } from "node:net";
import {
  AdminServer,
  type InstanceChange,
  KeptObjects,
  type Reloaded,
  readChange,
  WorkerMetrics,
  within,
} from "@kv/fleet/front-end";
import { listen } from "@kv/http";
import { type Clock, KvError, type Log, type Timer } from "@kv/interface";
import type { BirpcReturn } from "birpc";
import type { CliOptions } from "../config/cli-options.js";
import { readSettings } from "../config/settings.js";
import { PAGE, type ProxyStatus, type WorkerReport } from "../proxy.js";
import { answerObjectCall } from "../readback/object-store.js";
import { callsOver } from "./calls.js";
import {
  InstanceChangesLog,
  type Loads,
  type PrimaryCalls,
  type WorkerCalls,
  type WorkerStarted,
} from "./worker.js";
import { mergedInstances, mergedRequests, mergedRunning, mergedStatus } from "./worker-report.js";

export interface WorkerGroupAddress extends WorkerStarted {
  readonly adminUrl?: string | undefined;
}

interface RunningWorker {
  readonly worker: Worker;
  readonly calls: BirpcReturn<WorkerCalls, PrimaryCalls>;
  readonly forkedAtMs: number;
  /** It was told to start, with all changes so far. */
  starts: boolean;
  serving: boolean;
  loads: Loads;
}

/** A worker that answers later is left out. */
const ANSWER_MS = 2_000;
/** Interval of the messages that tell workers the others' load. */
const LOADS_MS = 100;
/** A worker that ends sooner after its fork delays its successor. */
const STEADY_MS = 10_000;
const FIRST_RESTART_MS = 500;
const MAX_RESTART_MS = 30_000;

/**
 * Runs several workers on one port. This process deals connections to them in turn, serves their
 * admin routes, and replaces workers that end.
 */
export class WorkerGroup {
  readonly #log: Log;
  readonly #clock: Clock;
  readonly #workers = new Map<number, RunningWorker>();
  readonly #metrics = new WorkerMetrics();
  readonly #changes = new InstanceChangesLog();
  readonly #admin: AdminServer | undefined;
  /** Ended turns, kept here so that only one worker claims each. */
  readonly #objects: KeptObjects | undefined;
  /** Runs instance changes and worker starts one after another. */
  #queue: Promise<unknown> = Promise.resolve();
  #port: number;
  #closing = false;
  #started = false;
  #restartMs = FIRST_RESTART_MS;
  #loadsTimer: Timer | undefined;

  constructor(
    private options: CliOptions,
    { log, clock }: { readonly log: Log; readonly clock: Clock },
  ) {
    this.#log = log;
    this.#clock = clock;
    this.#port = options.port;
    const { admin, readback } = readSettings(options.settings);
    this.#objects = readback && new KeptObjects({ clock, ttlMs: readback.ttlMs });
    if (admin === undefined) return;
    this.#admin = new AdminServer({
      settings: admin,
      clock,
      operations: {
        status: () => this.status(),
        metrics: { contentType: this.#metrics.contentType, text: () => this.#metricsText() },
        changeInstance: (change, body) => this.#changeInstance(change, body),
        page: {
          file: PAGE,
          requests: async () => mergedRequests(await this.#reports()),
          running: async () => mergedRunning(await this.#reports()),
        },
      },
    });
  }

  /** @throws The errors of a worker that cannot start; `KV_CONFIG_INVALID` when a port is taken. */
  async start(): Promise<WorkerGroupAddress> {
    const { host, workers } = this.options;
    cluster.schedulingPolicy = cluster.SCHED_RR;
    // A worker's successor must find the same port.
    if (this.#port === 0) this.#port = await freePort(host);
    try {
      const forks = Array.from({ length: workers }, () => this.#fork());
      const [first] = await Promise.all(forks);
      if (first === undefined) throw new KvError("KV_INTERNAL", "no worker was started");
      this.#started = true;
      return { ...first, adminUrl: await this.#admin?.listen() };
    } catch (error) {
      this.#closing = true;
      for (const { worker } of this.#workers.values()) worker.process.kill("SIGKILL");
      throw error;
    }
  }

  /** @throws `KV_PROXY_OVERLOADED` (503) when no worker answers. */
  async status(): Promise<ProxyStatus> {
    return { ...mergedStatus(await this.#reports()), readback: this.#objects?.status() ?? null };
  }

  /**
   * Gives all workers settings in place of those that they have. Workers that start later have them
   * too; their number and the port stay.
   * @throws `KV_CONFIG_INVALID`, `KV_CONFIG_UNKNOWN_KEY`; then nothing has changed.
   */
  reload({ settings, logLevel }: CliOptions): Promise<Reloaded> {
    return this.#inTurn(async () => {
      readSettings(settings);
      const next = { ...this.options, settings, logLevel };
      const answers = await Promise.all(this.#starting().map(({ calls }) => calls.reload(next)));
      this.options = next;
      return answers[0] ?? { changed: [], needRestart: [] };
    });
  }

  /** Resolves when all workers have ended. */
  async close(options: { readonly graceMs?: number }): Promise<void> {
    this.#closing = true;
    this.#loadsTimer?.cancel();
    await Promise.all(
      [...this.#workers.values()].map(async ({ worker, calls, serving }) => {
        const ended = new Promise<void>((resolve) => worker.once("exit", () => resolve()));
        if (serving) calls.close(options).catch(() => {});
        else worker.process.kill("SIGKILL");
        await ended;
      }),
    );
    await this.#admin?.close();
  }

  async #fork(): Promise<WorkerStarted> {
    const worker = cluster.fork();
    let listens = () => {};
    const listening = new Promise<void>((resolve, reject) => {
      listens = resolve;
      worker.once("exit", (code, signal) => {
        const how = signal ?? code;
        const error = new KvError("KV_REQUEST_ABORTED", `worker ${worker.id} has ended (${how})`);
        reject(error);
        calls.$close(error);
        this.#ended(running, code, signal);
      });
    });
    const calls = callsOver<WorkerCalls, PrimaryCalls>(
      {
        // A message sent before the worker listens is lost.
        listening: () => listens(),
        status: () => this.status(),
        changeInstance: (change, body) => this.#changeInstance(change, body),
        objects: (call) => this.#objects && answerObjectCall(this.#objects, call),
        loads: (loads) => {
          running.loads = loads;
          this.#loadsTimer ??= this.#clock.setTimer(() => this.#tellLoads(), LOADS_MS);
        },
      },
      {
        post: (message) => worker.isConnected() && worker.send(message),
        on: (receive) => void worker.on("message", receive),
      },
    );
    const running: RunningWorker = {
      worker,
      calls,
      forkedAtMs: this.#clock.now(),
      starts: false,
      serving: false,
      loads: {},
    };
    this.#workers.set(worker.id, running);
    // A worker that cannot receive is ending; its exit follows.
    worker.on("error", () => {});
    // A change in progress either ends before the list is read, or reaches this worker.
    await listening;
    await calls.warmUp(this.options);
    const start = await this.#inTurn(() => {
      running.starts = true;
      const changes = this.#changes.list();
      return {
        started: calls.start({ options: this.options, port: this.#port, changes }),
      };
    });
    const address = await start.started;
    running.serving = true;
    return address;
  }

  #ended(running: RunningWorker, code: number | null, signal: string | null): void {
    const { worker, forkedAtMs } = running;
    this.#workers.delete(worker.id);
    void this.#metrics.ended(worker.id);
    if (this.#closing || !this.#started) return;
    const steady = this.#clock.now() - forkedAtMs >= STEADY_MS;
    const delayMs = steady ? 0 : this.#restartMs;
    this.#restartMs = steady ? FIRST_RESTART_MS : Math.min(2 * this.#restartMs, MAX_RESTART_MS);
    this.#log.error("worker-ended", {
      worker: worker.id,
      pid: worker.process.pid,
      code,
      signal,
      restartInMs: delayMs,
    });
    this.#tellLoads();
    this.#clock.setTimer(() => void this.#replace(), delayMs);
  }

  async #replace(): Promise<void> {
    if (this.#closing) return;
    try {
      await this.#fork();
      this.#log.info("worker-started", { workers: this.#workers.size });
    } catch (thrown) {
      const error = KvError.from(thrown, "KV_INTERNAL", "a worker could not start");
      this.#log.error("worker-not-started", { error });
      // The end of a worker starts its successor.
      for (const { worker, serving } of this.#workers.values())
        if (!serving && worker.isConnected()) worker.process.kill("SIGKILL");
    }
  }

  #inTurn<T>(work: () => T | Promise<T>): Promise<T> {
    const result = this.#queue.then(work);
    this.#queue = result.catch(() => {});
    return result;
  }

  /** Leaves out workers that answer late. */
  async #ask<T>(ask: (calls: RunningWorker["calls"]) => Promise<T>): Promise<[RunningWorker, T][]> {
    const answers: [RunningWorker, T][] = [];
    const asked = this.#serving().map(async (running) => {
      answers.push([running, await ask(running.calls)]);
    });
    await within(this.#clock, ANSWER_MS, Promise.allSettled(asked));
    return [...answers];
  }

  /** Later ones get all changes with their start. */
  #starting(): RunningWorker[] {
    return [...this.#workers.values()].filter(({ starts }) => starts);
  }

  #serving(): RunningWorker[] {
    return [...this.#workers.values()].filter(({ serving }) => serving);
  }

  async #reports(): Promise<[WorkerReport, ...WorkerReport[]]> {
    const answers = await this.#ask((calls) => calls.report());
    const [first, ...others] = answers.map(([, report]) => report);
    if (first !== undefined) return [first, ...others];
    throw new KvError(
      "KV_PROXY_OVERLOADED",
      `none of the workers has answered within ${ANSWER_MS} ms`,
      {
        hint: "see the log for workers that have ended",
        details: { httpStatus: 503 },
      },
    );
  }

  async #metricsText(): Promise<string> {
    const [status, metrics] = await Promise.all([
      this.status(),
      this.#ask((calls) => calls.metrics()),
    ]);
    for (const [{ worker }, json] of metrics)
      if (this.#workers.has(worker.id)) this.#metrics.reported(worker.id, json);
    return await this.#metrics.text(status.signals, status.readback ?? undefined);
  }

  /** @throws The workers' errors, when none could make the change. */
  #changeInstance(change: InstanceChange, body: unknown): Promise<object> {
    return this.#inTurn(async () => {
      const named = readChange(body);
      const results = await Promise.allSettled(
        this.#starting().map(({ calls }) => calls.changeInstance(change, body)),
      );
      const made = results.flatMap((result) =>
        result.status === "fulfilled" ? [result.value] : [],
      );
      const refused = results.find((result) => result.status === "rejected");
      if (made.length === 0 && refused !== undefined) throw refused.reason;
      if (refused !== undefined)
        this.#log.warn("change-incomplete", { change, made: made.length, error: refused.reason });
      this.#changes.record(change, named);
      return mergedInstances(made);
    });
  }

  #tellLoads(): void {
    this.#loadsTimer?.cancel();
    this.#loadsTimer = undefined;
    const all: Record<string, number> = {};
    for (const { loads } of this.#workers.values())
      for (const [key, count] of Object.entries(loads)) all[key] = (all[key] ?? 0) + count;
    for (const { calls, loads } of this.#serving()) {
      const others = Object.entries(all).map(([key, count]) => [key, count - (loads[key] ?? 0)]);
      void calls.loadsElsewhere.asEvent(Object.fromEntries(others));
    }
  }
}

async function freePort(host: string): Promise<number> {
  const server = createServer();
  const port = await listen(server, host, 0);
  await new Promise((resolve) => server.close(resolve));
  return port;
}
