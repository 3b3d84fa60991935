import { execFile, spawn } from "node:child_process";
import { promisify } from "node:util";
import { builtProgram } from "@kv/testing/node-programs";

const cli = builtProgram("kv-peer");

/** Runs kv-peer in a process of its own. */
export function runKvPeer(
  ...args: string[]
): Promise<{ code: number; stdout: string; stderr: string }> {
  return promisify(execFile)(process.execPath, [cli, ...args]).then(
    ({ stdout, stderr }) => ({ code: 0, stdout, stderr }),
    (error: { code: number; stdout: string; stderr: string }) => error,
  );
}

/** Starts kv-peer in a process of its own. */
export function spawnKvPeer(...args: string[]) {
  return spawn(process.execPath, [cli, ...args], { stdio: ["ignore", "pipe", "pipe"] });
}
