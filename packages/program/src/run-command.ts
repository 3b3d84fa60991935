import { spawn } from "node:child_process";
import { type ProcessEnd, processEnd, readText } from "./process-end.js";

/** How a command is run. */
export interface CommandOptions {
  /** The whole environment. @default process.env */
  readonly env?: Readonly<Record<string, string | undefined>> | undefined;
  /** Then the command is killed. @default no limit */
  readonly timeoutMs?: number | undefined;
  /** Gets each line of output, except empty ones. */
  readonly onLine?: ((line: string) => void) | undefined;
}

/** How a command ended, with the end of its output. */
export interface CommandResult extends ProcessEnd {
  /** At most 8 Mi characters. */
  readonly stdout: string;
  /** At most 8 Mi characters. */
  readonly stderr: string;
}

const KEPT_CHARACTERS = 8 << 20;

/** Runs a program other than Node's, such as python3. Never rejects. */
export async function runCommand(
  program: string,
  args: readonly string[],
  { env = process.env, timeoutMs, onLine }: CommandOptions = {},
): Promise<CommandResult> {
  const child = spawn(program, args, {
    stdio: ["ignore", "pipe", "pipe"],
    env: env as NodeJS.ProcessEnv,
  });
  const kept = { stdout: "", stderr: "" };
  for (const name of ["stdout", "stderr"] as const) {
    let rest = "";
    readText(child[name], (text) => {
      kept[name] = (kept[name] + text).slice(-KEPT_CHARACTERS);
      if (onLine === undefined) return;
      const lines = (rest + text).split(/\r?\n/);
      rest = lines.pop() ?? "";
      for (const line of lines) if (line.trim() !== "") onLine(line.trim());
    });
    child[name].once("end", () => {
      if (rest.trim() !== "") onLine?.(rest.trim());
    });
  }
  let late = false;
  const timer =
    timeoutMs &&
    setTimeout(() => {
      late = true;
      child.kill("SIGKILL");
    }, timeoutMs);
  const end = await processEnd(child);
  clearTimeout(timer);
  return {
    ...end,
    ...(late ? { how: `no end within ${Number(timeoutMs) / 1000} s` } : {}),
    ...kept,
  };
}
