import { spawn } from "node:child_process";
import { createRequire } from "node:module";

/**
 * How a task in a child process ended: with its value, with an error of the task, with a crash, or after too long. `output` is the end of
 * stdout and stderr, 1 MiB at most.
 */
export type ChildOutcome =
  | { readonly kind: "answered"; readonly value: unknown; readonly output: string }
  | { readonly kind: "failed"; readonly error: ChildError; readonly output: string }
  | { readonly kind: "died"; readonly how: string; readonly output: string }
  | { readonly kind: "late"; readonly timeoutMs: number; readonly output: string };

/** An error of the task, as it crosses the IPC channel. */
export interface ChildError {
  /** The code of the `KvError`. */
  readonly code: string;
  /** Its message. */
  readonly message: string;
  /** Its hint. */
  readonly hint?: string | undefined;
}

/** How a task is run. */
export interface RunChildOptions {
  /** The process is killed after this long. */
  readonly timeoutMs: number;
  /** Its whole environment; `process.env` by default. */
  readonly env?: Readonly<Record<string, string | undefined>> | undefined;
}

const KEPT_OUTPUT_BYTES = 1 << 20;

/** Arguments for `node` that run a task of `main.ts`. */
export function childArguments(task: string, args: readonly string[]): string[] {
  return [createRequire(import.meta.url).resolve("@kv/nixl/child"), task, ...args];
}

/** Runs a task in another process, so that a crash or a hang of NIXL does not affect this one. The answer comes over IPC, because NIXL and UCX write to stdout. Never rejects. */
export function runInChild(
  task: string,
  args: readonly string[],
  { timeoutMs, env = process.env }: RunChildOptions,
): Promise<ChildOutcome> {
  return new Promise((resolve) => {
    const child = spawn(process.execPath, childArguments(task, args), {
      stdio: ["ignore", "pipe", "pipe", "ipc"],
      env: env as NodeJS.ProcessEnv,
    });
    let output = "";
    let answer: { value?: unknown; error?: ChildError } | undefined;
    let late = false;
    const keep = (chunk: string) => {
      output = (output + chunk).slice(-KEPT_OUTPUT_BYTES);
    };
    child.stdout?.setEncoding("utf8").on("data", keep);
    child.stderr?.setEncoding("utf8").on("data", keep);
    child.on("message", (message) => {
      answer ??= message as { value?: unknown; error?: ChildError };
    });
    const timer = setTimeout(() => {
      late = true;
      child.kill("SIGKILL");
    }, timeoutMs);
    const end = (outcome: ChildOutcome) => {
      clearTimeout(timer);
      resolve(outcome);
    };
    child.once("error", (error) => end({ kind: "died", how: error.message, output }));
    child.once("close", (code, signal) => {
      if (late) end({ kind: "late", timeoutMs, output });
      else if (answer?.error !== undefined) end({ kind: "failed", error: answer.error, output });
      // A crash after the answer counts as a crash: a program that does the same work would crash, too.
      else if (answer !== undefined && code === 0) end({ kind: "answered", value: answer.value, output });
      else end({ kind: "died", how: signal ?? `exit code ${code}`, output });
    });
  });
}
