import { spawn } from "node:child_process";
import { runCommand } from "@kv/program";
import { builtProgram } from "@kv/testing/node-programs";

const cli = builtProgram("kv-peer");

/** Runs kv-peer in a process of its own. `line`: its arguments, without spaces in them. */
export async function runKvPeer(line: string) {
  const args = [cli, ...line.split(" ")];
  const { exitCode: code, stdout, stderr } = await runCommand(process.execPath, args);
  return { code, stdout, stderr };
}

export function spawnKvPeer(line: string) {
  return spawn(process.execPath, [cli, ...line.split(" ")], { stdio: ["ignore", "pipe", "pipe"] });
}
