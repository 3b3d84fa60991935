import { execFile, spawn } from "node:child_process";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";

const cli = fileURLToPath(new URL("../src/cli.ts", import.meta.url));

/** Runs kv-peer from its sources in a process of its own. */
export function runKvPeer(...args: string[]): Promise<{ code: number; stdout: string; stderr: string }> {
  return promisify(execFile)(process.execPath, ["--import", "tsx", cli, ...args]).then(
    ({ stdout }) => ({ code: 0, stdout, stderr: "" }),
    (error: { code: number; stdout: string; stderr: string }) => error,
  );
}

/** Starts kv-peer from its sources in a process of its own. */
export function spawnKvPeer(...args: string[]) {
  return spawn(process.execPath, ["--import", "tsx", cli, ...args], { stdio: ["ignore", "pipe", "pipe"] });
}
