import { spawn } from "node:child_process";
import { fileURLToPath } from "node:url";
import { bundled } from "@kv/testing/node-programs";

const ROOT = fileURLToPath(new URL("../../../..", import.meta.url));

export interface ChildEnd {
  code: number | null;
  signal: NodeJS.Signals | null;
  stdout: string;
  stderr: string;
}

/** Runs a file of `children/` to its end. */
export async function runChild(
  file: string,
  args: readonly string[] = [],
  options: { env?: Record<string, string>; nodeOptions?: readonly string[] } = {},
): Promise<ChildEnd> {
  const path = fileURLToPath(new URL(`../children/${file}`, import.meta.url));
  return run([...(options.nodeOptions ?? []), await bundled(path), ...args], options);
}

/** Runs `node` with these arguments to its end; `only` replaces its whole environment. */
export function run(
  args: readonly string[],
  options: { env?: Record<string, string>; only?: Record<string, string> } = {},
): Promise<ChildEnd> {
  return new Promise((resolve) => {
    const child = spawn(process.execPath, args, {
      cwd: ROOT,
      env: options.only ?? { ...process.env, ...options.env },
      stdio: ["ignore", "pipe", "pipe"],
    });
    let stdout = "";
    let stderr = "";
    child.stdout.on("data", (chunk: Buffer) => {
      stdout += chunk.toString("latin1");
    });
    child.stderr.on("data", (chunk: Buffer) => {
      stderr += chunk.toString("latin1");
    });
    child.once("close", (code, signal) => resolve({ code, signal, stdout, stderr }));
  });
}
