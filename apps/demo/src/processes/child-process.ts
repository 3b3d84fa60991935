import { createRequire } from "node:module";
import { ChildProcess } from "@kv/program";
import type { SideChannelAddress } from "../instance/observed-side-channel.js";

export interface ChildOptions {
  /** Name in error messages. */
  readonly name: string;
  /** Arguments of the program: a role and its settings. */
  readonly args: readonly string[];
}

/** What a server says when it is ready. */
export interface ReadyServer {
  readonly url: string;
  readonly port: number;
  readonly backend: string | null;
  /** Of the first data-parallel rank; null for a proxy. */
  readonly sideChannel: SideChannelAddress | null;
}

/** A server in a child process, which ends with this process. */
export interface Child extends ReadyServer {
  readonly name: string;
  readonly pid: number;
  /** Resolves with the signal, the exit code or the error when the process has ended. */
  readonly ended: Promise<string>;
  /** Sends SIGTERM, and SIGKILL when the process has not ended after 10 s. */
  stop(): Promise<void>;
}

const READY_TIMEOUT_MS = 120_000;

/** Starts a role of this program. Errors: the child's own `KvError` when it fails to start; `KV_ENGINE_FAILED` when it ends or is not ready in time. */
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
    return { name, pid: child.pid, ...server, ended: child.ended, stop: () => child.close("SIGTERM") };
  } catch (error) {
    child.kill();
    await child.ended;
    throw error;
  }
}
