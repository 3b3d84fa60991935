import { createRequire } from "node:module";
import type { Log } from "@kv/interface";
import { ChildProcess } from "@kv/program";
import type { SideChannelAddress } from "../instance/engine-rank.js";

export interface ChildOptions {
  readonly name: string;
  readonly args: readonly string[];
}

export interface ReadyServer {
  readonly url: string;
  readonly port: number;
  readonly backend: string | null;
  readonly sideChannel: SideChannelAddress | null;
}

/** A server in a child process, which ends with this process. */
export interface Child extends ReadyServer {
  readonly name: string;
  readonly pid: number;
  readonly ended: Promise<string>;
  /** Sends SIGTERM, and SIGKILL when the process has not ended after 10 s. */
  stop(): Promise<void>;
}

const READY_TIMEOUT_MS = 120_000;

/**
 * Starts a role of this program.
 * @throws The child's own `KvError` when it fails to start; `KV_ENGINE_FAILED` when it ends or is
 * not ready in time.
 */
export async function startChild({ name, args }: ChildOptions): Promise<Child> {
  const module = createRequire(import.meta.url).resolve("@kv/demo/main");
  // Its stdout goes to stderr, because stdout is for results.
  const child = new ChildProcess({ module, args: [...args, "--child"], output: "stderr" });
  try {
    const server = await child.answer<ReadyServer>({
      what: `${name} did not start`,
      code: "KV_ENGINE_FAILED",
      prefix: `${name}: `,
      timeoutMs: READY_TIMEOUT_MS,
    });
    return {
      name,
      pid: child.pid,
      ...server,
      ended: child.ended,
      stop: () => child.close("SIGTERM"),
    };
  } catch (error) {
    child.kill();
    await child.ended;
    throw error;
  }
}

export interface SupervisorOptions {
  readonly start: (before?: Pick<Child, "port" | "sideChannel">) => Promise<Child>;
  /**
   * Whether a server that has ended is restarted. False: its end is only logged. Asked again before
   * the restart, as all servers may end with their terminal.
   */
  readonly restart: () => boolean;
  readonly log: Log;
}

/** Pause before a restart, so that a child that fails at once is not started in a tight loop. */
const RESTART_PAUSE_MS = 500;

/** A server in a child process that is restarted at the same address when it ends. */
export class SupervisedServer {
  readonly name: string;
  readonly url: string;
  readonly backend: string | null;
  readonly sideChannel: SideChannelAddress | null;
  readonly #options: SupervisorOptions;
  readonly #restartListeners: (() => void)[] = [];
  readonly #watching: Promise<void>;
  #child: Child;
  #isStopping = false;

  private constructor(options: SupervisorOptions, child: Child) {
    this.name = child.name;
    this.url = child.url;
    this.backend = child.backend;
    this.sideChannel = child.sideChannel;
    this.#options = options;
    this.#child = child;
    this.#watching = this.#watch();
  }

  static async start(options: SupervisorOptions): Promise<SupervisedServer> {
    return new SupervisedServer(options, await options.start());
  }

  get pid(): number {
    return this.#child.pid;
  }

  replaced(): Promise<void> {
    return new Promise((resolve) => this.#restartListeners.push(resolve));
  }

  async stop(): Promise<void> {
    this.#isStopping = true;
    await this.#child.stop();
    await this.#watching;
    // A restart may have been under way.
    await this.#child.stop();
  }

  async #watch(): Promise<void> {
    const { log, restart } = this.#options;
    const { name, url } = this;
    while (!this.#isStopping) {
      const how = await this.#child.ended;
      if (this.#isStopping) return;
      log.warn("process-ended", { name, pid: this.pid, how, restart: restart() });
      const before = this.#child;
      this.#child = await this.#startAgain();
      if (this.#child === before) return;
      log.info("process-restarted", { name, pid: this.pid, url });
      for (const resolve of this.#restartListeners.splice(0)) resolve();
    }
  }

  async #startAgain(): Promise<Child> {
    const { start, restart, log } = this.#options;
    for (;;) {
      if (restart()) await new Promise((resolve) => setTimeout(resolve, RESTART_PAUSE_MS));
      if (this.#isStopping || !restart()) return this.#child;
      try {
        return await start(this.#child);
      } catch (error) {
        log.warn("restart-failed", { name: this.name, error: String(error) });
      }
    }
  }
}
