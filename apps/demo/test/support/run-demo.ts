import { type ChildProcess, spawn } from "node:child_process";
import { fileURLToPath } from "node:url";

const root = fileURLToPath(new URL("../../../..", import.meta.url));
const entry = fileURLToPath(new URL("../../src/main.ts", import.meta.url));

/** Starts the demo's command line from source. */
export function startDemo(args: readonly string[], env: Record<string, string> = {}): ChildProcess {
  return startNode(["--import", "tsx", entry, ...args], env);
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
