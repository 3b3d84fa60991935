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

/** Runs kv-peer verify on a pair; `verdict` is what failed, or the last words on stderr. */
export async function verifyPair(
  front: string,
  { prefill, decode }: { readonly prefill: string; readonly decode: string },
  more: string,
) {
  const line = `verify ${front} --prefill ${prefill} --decode ${decode} ${more}`;
  const { stderr, ...ended } = await runKvPeer(line);
  return { ...ended, verdict: /\n(?:fail|warn|ok): (.*)\n$/.exec(ended.stdout)?.[1] ?? stderr };
}

export function spawnKvPeer(line: string) {
  return spawn(process.execPath, [cli, ...line.split(" ")], { stdio: ["ignore", "pipe", "pipe"] });
}
