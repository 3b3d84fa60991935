import { spawn } from "node:child_process";
import { once } from "node:events";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";
import { builtProgram } from "@kv/testing/node-programs";
import { onTestFinished } from "vitest";

const root = fileURLToPath(new URL("../../../../", import.meta.url));

/** Runs kv-proxy with these words in a process of its own, which ends with the test. */
export function startCli(args: string, env: NodeJS.ProcessEnv = {}) {
  const child = spawn(process.execPath, [builtProgram("kv-proxy"), ...args.split(" ")], {
    cwd: root,
    stdio: ["ignore", "pipe", "pipe"],
    env: { ...process.env, ...env },
  });
  onTestFinished(() => {
    if (child.exitCode === null) child.kill("SIGKILL");
  });
  const lines = createInterface({ input: child.stdout })[Symbol.asyncIterator]();
  let stderr = "";
  child.stderr.setEncoding("utf8").on("data", (text: string) => (stderr += text));
  const exited = once(child, "close").then(([code]) => code as number | null);
  return {
    child,
    exited,
    line: async () => String((await lines.next()).value),
    stderr: () => stderr,
  };
}
