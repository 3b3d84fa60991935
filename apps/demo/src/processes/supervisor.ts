import type { Log } from "@kv/interface";
import type { Child } from "./child-process.js";

/** A server that is started again when it ends unasked, at the same address. */
export interface Supervised {
  readonly name: string;
  readonly url: string;
  readonly backend: string | null;
  /** Of the process that runs now. */
  readonly pid: number;
  /** Resolves when the process that runs now has been replaced. */
  replaced(): Promise<void>;
  stop(): Promise<void>;
}

export interface SuperviseOptions {
  /** Starts it on this port; 0 takes a free one. */
  readonly start: (port: number) => Promise<Child>;
  /** False: it is not started again, only reported. */
  readonly restart: boolean;
  readonly log: Log;
}

const RESTART_PAUSE_MS = 500;

export async function supervise({ start, restart, log }: SuperviseOptions): Promise<Supervised> {
  let child = await start(0);
  const { name, url, port, backend } = child;
  const waiting: (() => void)[] = [];
  let stopping = false;

  async function watch(): Promise<void> {
    while (!stopping) {
      const how = await child.ended;
      if (stopping) return;
      log.warn("process-ended", { name, pid: child.pid, how, restart });
      if (!restart) return;
      child = await startAgain();
      log.info("process-restarted", { name, pid: child.pid, url });
      for (const resolve of waiting.splice(0)) resolve();
    }
  }

  async function startAgain(): Promise<Child> {
    for (;;) {
      // A child that fails at once must not be started in a tight circle.
      await new Promise((resolve) => setTimeout(resolve, RESTART_PAUSE_MS));
      if (stopping) return child;
      try {
        return await start(port);
      } catch (error) {
        log.warn("restart-failed", { name, error: String(error) });
      }
    }
  }

  const watching = watch();
  return {
    name,
    url,
    backend,
    get pid() {
      return child.pid;
    },
    replaced: () => new Promise((resolve) => waiting.push(resolve)),
    async stop() {
      stopping = true;
      await child.stop();
      await watching;
      await child.stop();
    },
  };
}
