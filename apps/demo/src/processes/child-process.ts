import { spawn } from "node:child_process";
import { fileURLToPath } from "node:url";
import { KV_ERROR_CODES, KvError, type KvErrorCode } from "@kv/interface";

export interface ChildOptions {
  /** For messages. */
  readonly name: string;
  /** Arguments of the program: a role and its settings. */
  readonly args: readonly string[];
  readonly env?: Readonly<Record<string, string>>;
  readonly readyTimeoutMs?: number;
}

/** A server in a process of its own, which ends with this process. */
export interface Child {
  readonly name: string;
  readonly pid: number;
  readonly url: string;
  readonly port: number;
  readonly backend: string | null;
  /** Resolves when the process has ended, for whatever reason. */
  readonly ended: Promise<string>;
  /** SIGTERM, and SIGKILL when it has not ended after `patienceMs`. */
  stop(patienceMs?: number): Promise<void>;
}

const READY_TIMEOUT_MS = 120_000;
const STOP_PATIENCE_MS = 10_000;

/** Errors: the child's own `KvError` when it fails to start, `KV_ENGINE_FAILED` when it ends or stays silent before it is ready. */
export async function startChild(options: ChildOptions): Promise<Child> {
  const { name, args, readyTimeoutMs = READY_TIMEOUT_MS } = options;
  const child = spawn(process.execPath, [...entryArguments(), ...args], {
    // Its stdout goes to our stderr: ours is for results.
    stdio: ["ignore", 2, "inherit", "ipc"],
    env: { ...process.env, ...options.env },
  });
  const ended = new Promise<string>((resolve) => {
    child.once("exit", (code, signal) => resolve(signal ?? `exit code ${code}`));
    child.once("error", (error) => resolve(error.message));
  });
  let timer: NodeJS.Timeout | undefined;
  const ready = new Promise<Extract<FromChild, { kind: "ready" }>>((resolve, reject) => {
    const fail = (message: string) => reject(new KvError("KV_ENGINE_FAILED", `${name} ${message}`));
    child.on("message", (message: FromChild) => {
      if (message.kind === "ready") resolve(message);
      else reject(revived(name, message.error));
    });
    timer = setTimeout(() => fail(`was not ready within ${readyTimeoutMs / 1000} s`), readyTimeoutMs);
    void ended.then((how) => fail(`ended before it was ready (${how})`));
  });
  try {
    const { url, port, backend } = await ready;
    return {
      name,
      pid: child.pid ?? 0,
      url,
      port,
      backend,
      ended,
      async stop(patienceMs = STOP_PATIENCE_MS) {
        child.kill("SIGTERM");
        const impatience = setTimeout(() => child.kill("SIGKILL"), patienceMs);
        await ended;
        clearTimeout(impatience);
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

function revived(
  name: string,
  { code, message, hint }: { code: string; message: string; hint: string | undefined },
): KvError {
  const known: KvErrorCode = KV_ERROR_CODES.find((each) => each === code) ?? "KV_INTERNAL";
  return new KvError(known, `${name}: ${message}`, hint === undefined ? {} : { hint });
}

/** Arguments for `process.execPath` that run this program anew: from source by tsx, else the bundle. */
export function entryArguments(): string[] {
  const here = import.meta.url;
  if (here.endsWith(".ts")) return ["--import", "tsx", fileURLToPath(new URL("../main.ts", here))];
  return [fileURLToPath(new URL("./main.js", here))];
}

/** What a child process of the demo says to its parent over Node's IPC channel. */
export type FromChild =
  | { readonly kind: "ready"; readonly url: string; readonly port: number; readonly backend: string | null }
  | { readonly kind: "failed"; readonly error: ChildFailure };

/** A `KvError` on its way between processes. */
export interface ChildFailure {
  readonly code: string;
  readonly message: string;
  readonly hint: string | undefined;
}
