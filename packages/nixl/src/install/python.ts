import { spawn } from "node:child_process";
import { KvError } from "@kv/interface";
import type { Environment } from "../environment.js";

/** How a program ended. */
export interface ProgramOutcome {
  /** The exit code; null after a signal, undefined when the program could not be started. */
  readonly status: number | null | undefined;
  /** Its output, stdout and stderr, without empty lines. */
  readonly lines: readonly string[];
}

const KEPT_LINES = 50;

/**
 * Runs python3's pip with the user's configuration. `options` are left out of the command that an error suggests. Rejects with
 * `KV_INSTALL_FAILED`.
 */
export async function pip(
  command: readonly string[],
  options: readonly string[],
  { environment, onProgress }: { environment: Environment; onProgress: (line: string) => void },
): Promise<void> {
  const quiet = ["--disable-pip-version-check", "--progress-bar", "off"];
  const args = ["-m", "pip", ...command, ...quiet, ...options];
  const { status, lines } = await run("python3", args, environment, onProgress);
  if (status === 0) return;
  const output = lines.join("\n");
  if (status === undefined) {
    throw new KvError("KV_INSTALL_FAILED", "python3 was not found on PATH; NIXL is downloaded with pip", {
      hint: "install Python 3 with pip, such as: apt-get install python3 python3-pip",
    });
  }
  if (/No module named pip/.test(output)) {
    throw new KvError("KV_INSTALL_FAILED", "python3 has no pip; NIXL is downloaded with pip", {
      hint: "python3 -m ensurepip --user, or: apt-get install python3-pip",
    });
  }
  const reason = lines.findLast((line) => line.startsWith("ERROR:")) ?? lines.at(-1) ?? `status ${status}`;
  throw new KvError("KV_INSTALL_FAILED", `pip could not download NIXL: ${reason}`, {
    hint: `is the package index reachable? Try: python3 -m pip ${command.join(" ")}`,
    details: { output: lines.slice(-KEPT_LINES) },
  });
}

/** Runs a program to its end. `onLine` gets its output line by line. Never rejects. */
export function run(
  program: string,
  args: readonly string[],
  environment: Environment,
  onLine: (line: string) => void,
): Promise<ProgramOutcome> {
  return new Promise((resolve) => {
    const lines: string[] = [];
    let rest = "";
    const child = spawn(program, args, {
      stdio: ["ignore", "pipe", "pipe"],
      env: environment as NodeJS.ProcessEnv,
    });
    const take = (chunk: string) => {
      const parts = (rest + chunk).split(/\r?\n/);
      rest = parts.pop() ?? "";
      for (const line of parts.filter((part) => part.trim() !== "")) {
        lines.push(line.trim());
        onLine(line.trim());
      }
    };
    child.stdout.setEncoding("utf8").on("data", take);
    child.stderr.setEncoding("utf8").on("data", take);
    child.once("error", (error) => resolve({ status: undefined, lines: [...lines, error.message] }));
    child.once("close", (status) => {
      take("\n");
      resolve({ status, lines });
    });
  });
}
