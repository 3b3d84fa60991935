import { type ChildProcess, spawn } from "node:child_process";
import { fileURLToPath } from "node:url";
import { builtProgram } from "@kv/testing/node-programs";

const root = fileURLToPath(new URL("../../../..", import.meta.url));

/** Starts the demo's command line. */
export function startDemo(args: readonly string[], env: Record<string, string> = {}): ChildProcess {
  return startNode([builtProgram("demo"), ...args], env);
}

export function startNode(args: readonly string[], env: Record<string, string>): ChildProcess {
  return spawn(process.execPath, args, {
    cwd: root,
    env: { ...process.env, ...env },
    stdio: ["ignore", "pipe", "pipe"],
  });
}

/** Resolves with the output and the exit code. */
export async function ended(child: ChildProcess) {
  let stdout = "";
  let stderr = "";
  child.stdout?.on("data", (piece) => (stdout += piece));
  child.stderr?.on("data", (piece) => (stderr += piece));
  const code = await new Promise<number | null>((resolve) => child.once("close", resolve));
  return { code, stdout, stderr };
}
