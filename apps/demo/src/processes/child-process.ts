import { spawn } from "node:child_process";
import { createRequire } from "node:module";
import { KV_ERROR_CODES, KvError, type KvErrorCode } from "@kv/interface";
import type { SideChannelAddress } from "../instance/observed-side-channel.js";

export interface ChildOptions {
  /** Name in error messages. */
  readonly name: string;
  /** Arguments of the program: a role and its settings. */
  readonly args: readonly string[];
}

/** A message from a child process to the demo over Node's IPC channel. */
export type ChildMessage =
  | {
      readonly kind: "ready";
      readonly url: string;
      readonly port: number;
      readonly backend: string | null;
      readonly sideChannel: SideChannelAddress | null;
    }
  | {
      readonly kind: "failed";
      /** The fields of a `KvError`. */
      readonly error: {
        readonly code: string;
        readonly message: string;
        readonly hint?: string | undefined;
      };
    };

/** A server in a child process, which ends with this process. */
export interface Child {
  readonly name: string;
  readonly pid: number;
  readonly url: string;
  readonly port: number;
  readonly backend: string | null;
  /** Of the first data-parallel rank; null for a proxy. */
  readonly sideChannel: SideChannelAddress | null;
  /** Resolves with the signal, the exit code or the error when the process has ended. */
  readonly ended: Promise<string>;
  /** Sends SIGTERM, and SIGKILL when the process has not ended after 10 s. */
  stop(): Promise<void>;
}

const READY_TIMEOUT_MS = 120_000;
const STOP_TIMEOUT_MS = 10_000;

/** Starts a role of this program. Errors: the child's own `KvError` when it fails to start; `KV_ENGINE_FAILED` when it ends or is not ready in time. */
export async function startChild({ name, args }: ChildOptions): Promise<Child> {
  const child = spawn(
    process.execPath,
    [createRequire(import.meta.url).resolve("@kv/demo/main"), ...args, "--child"],
    {
      // The child's stdout goes to stderr, because stdout is for results.
      stdio: ["ignore", 2, "inherit", "ipc"],
    },
  );
  const ended = new Promise<string>((resolve) => {
    child.once("exit", (code, signal) => resolve(signal ?? `exit code ${code}`));
    child.once("error", (error) => resolve(error.message));
  });
  let timer: NodeJS.Timeout | undefined;
  const ready = new Promise<Extract<ChildMessage, { kind: "ready" }>>((resolve, reject) => {
    const fail = (message: string) => reject(new KvError("KV_ENGINE_FAILED", `${name} ${message}`));
    child.on("message", (message: ChildMessage) => {
      if (message.kind === "ready") resolve(message);
      else reject(toKvError(name, message.error));
    });
    timer = setTimeout(() => fail(`was not ready within ${READY_TIMEOUT_MS / 1000} s`), READY_TIMEOUT_MS);
    void ended.then((how) => fail(`ended before it was ready (${how})`));
  });
  try {
    const { url, port, backend, sideChannel } = await ready;
    return {
      name,
      pid: child.pid ?? 0,
      url,
      port,
      backend,
      sideChannel,
      ended,
      async stop() {
        child.kill("SIGTERM");
        const timeout = setTimeout(() => child.kill("SIGKILL"), STOP_TIMEOUT_MS);
        await ended;
        clearTimeout(timeout);
      },
    };
  } catch (error) {
    child.kill("SIGKILL");
    await ended;
    throw error;
  } finally {
    clearTimeout(timer);
  }
}

function toKvError(
  name: string,
  { code, message, hint }: Extract<ChildMessage, { kind: "failed" }>["error"],
): KvError {
  const known: KvErrorCode = KV_ERROR_CODES.find((each) => each === code) ?? "KV_INTERNAL";
  return new KvError(known, `${name}: ${message}`, hint === undefined ? {} : { hint });
}
