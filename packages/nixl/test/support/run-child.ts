import { execFile } from "node:child_process";
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
  const env = options.only ?? { ...process.env, ...options.env };
  const settings = { cwd: ROOT, env, encoding: "latin1", maxBuffer: 2 ** 26 } as const;
  return new Promise((resolve) => {
    const child = execFile(process.execPath, args, settings, (_error, stdout, stderr) =>
      resolve({ code: child.exitCode, signal: child.signalCode, stdout, stderr }),
    );
    child.stdin?.end();
  });
}
