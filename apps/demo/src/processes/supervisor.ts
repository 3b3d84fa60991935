import type { Log } from "@kv/interface";
import type { SideChannelAddress } from "../instance/observed-side-channel.js";
import type { Child } from "./child-process.js";

export interface SupervisorOptions {
  /** Starts the server: anew, or at the addresses of a child that ended. */
  readonly start: (before?: Pick<Child, "port" | "sideChannel">) => Promise<Child>;
  /** Whether a server that has ended is restarted. False: its end is only logged. Asked again before the restart, as all servers may end with their terminal. */
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

  /** Starts the server. Errors: those of `start`. */
  static async start(options: SupervisorOptions): Promise<SupervisedServer> {
    return new SupervisedServer(options, await options.start());
  }

  /** The process id of the current process. */
  get pid(): number {
    return this.#child.pid;
  }

  /** Resolves when the current process has been replaced. */
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
