import { spawn } from "node:child_process";
import { fileURLToPath } from "node:url";

/** What a child was asked to do, and how that ended. A crash or a hang of NIXL is an outcome here, not the end of the caller. */
export type ChildOutcome =
  | { readonly kind: "answered"; readonly value: unknown; readonly output: string }
  | { readonly kind: "failed"; readonly error: ChildError; readonly output: string }
  | { readonly kind: "died"; readonly how: string; readonly output: string }
  | { readonly kind: "late"; readonly timeoutMs: number; readonly output: string };

export interface ChildError {
  readonly code: string;
  readonly message: string;
  readonly hint?: string;
}

export interface RunChildOptions {
  readonly timeoutMs: number;
  readonly env?: Readonly<Record<string, string | undefined>>;
}

const KEPT_OUTPUT_BYTES = 1 << 20;
/** In the repository the sources run as they are, through tsx; in the package the build does. */
const isSource = import.meta.url.endsWith(".ts");

/** Arguments for `node` that run a task of `child.ts` in another process. */
export function childArguments(task: string, args: readonly string[]): string[] {
  const file = fileURLToPath(new URL(isSource ? "./main.ts" : "./child.js", import.meta.url));
  return [...(isSource ? ["--import", "tsx"] : []), file, task, ...args];
}

/** Runs a task in another process, and kills it when it has not answered in time. It answers over IPC: NIXL and UCX may write what they like. */
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
      // An answer and then a crash is a crash: whoever does the same work in its own process would see it.
      else if (answer !== undefined && code === 0) end({ kind: "answered", value: answer.value, output });
      else end({ kind: "died", how: signal ?? `exit code ${code}`, output });
    });
  });
}
