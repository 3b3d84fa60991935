import { createRequire } from "node:module";
import { setTimeout as sleep } from "node:timers/promises";
import type { Log } from "@kv/interface";
import { ChildProcess } from "@kv/program";
import type { SideChannelAddress } from "../instance/engine-rank.js";

export interface ReadyServer {
  readonly url: string;
  readonly port: number;
  readonly backend: string | null;
  readonly sideChannel: SideChannelAddress | null;
}

const READY_TIMEOUT_MS = 120_000;

export interface SupervisorOptions {
  readonly name: string;
  /** A role of this program, at the address of the one `before`. */
  argumentsFor(before?: ReadyServer): readonly string[];
  /** Asked again before a restart, as all servers may end with their terminal. */
  restart(): boolean;
  readonly log: Log;
}

/** So that a child that fails at once is not started in a tight loop. */
const RESTART_PAUSE_MS = 500;

/** A server in a child process, restarted at the same address when it ends. */
export class SupervisedServer {
  readonly ready: ReadyServer;
  readonly #options: SupervisorOptions;
  readonly #restartListeners: (() => void)[] = [];
  readonly #watching: Promise<void>;
  #child: ChildProcess;
  #isStopping = false;

  private constructor(options: SupervisorOptions, child: ChildProcess, ready: ReadyServer) {
    this.#options = options;
    this.#child = child;
    this.ready = ready;
    this.#watching = this.#watch();
  }

  /** @throws The child's own `KvError`; `KV_ENGINE_FAILED` when it ends or is not ready in time. */
  static async start(options: SupervisorOptions): Promise<SupervisedServer> {
    const { child, ready } = await startChild(options);
    return new SupervisedServer(options, child, ready);
  }

  get pid(): number {
    return this.#child.pid;
  }

  replaced(): Promise<void> {
    return new Promise((resolve) => this.#restartListeners.push(resolve));
  }

  /** Sends SIGTERM, and SIGKILL when the process has not ended after 10 s. */
  async stop(): Promise<void> {
    this.#isStopping = true;
    await this.#child.close("SIGTERM");
    await this.#watching;
    // A restart may have been under way.
    await this.#child.close("SIGTERM");
  }

  async #watch(): Promise<void> {
    const { name, log, restart } = this.#options;
    while (!this.#isStopping) {
      const how = await this.#child.ended;
      if (this.#isStopping) return;
      log.warn("process-ended", { name, pid: this.pid, how, restart: restart() });
      if (!(await this.#startAgain())) return;
      log.info("process-restarted", { name, pid: this.pid, url: this.ready.url });
      for (const resolve of this.#restartListeners.splice(0)) resolve();
    }
  }

  async #startAgain(): Promise<boolean> {
    const { name, restart, log } = this.#options;
    for (;;) {
      if (restart()) await sleep(RESTART_PAUSE_MS);
      if (this.#isStopping || !restart()) return false;
      try {
        this.#child = (await startChild(this.#options, this.ready)).child;
        return true;
      } catch (error) {
        log.warn("restart-failed", { name, error: String(error) });
      }
    }
  }
}

async function startChild({ name, argumentsFor }: SupervisorOptions, before?: ReadyServer) {
  const module = createRequire(import.meta.url).resolve("@kv/demo/main");
  // Its stdout goes to stderr, because stdout is for results.
  const args = [...argumentsFor(before), "--child"];
  const child = new ChildProcess({ module, args, output: "stderr" });
  try {
    const ready = await child.answer<ReadyServer>({
      what: `${name} did not start`,
      code: "KV_ENGINE_FAILED",
      prefix: `${name}: `,
      timeoutMs: READY_TIMEOUT_MS,
    });
    return { child, ready };
  } catch (error) {
    child.kill();
    await child.ended;
    throw error;
  }
}
