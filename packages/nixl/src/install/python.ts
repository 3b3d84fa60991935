import { KvError } from "@kv/interface";
import { runCommand } from "@kv/program";
import type { Environment } from "../environment.js";

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
  const lines: string[] = [];
  const onLine = (line: string) => {
    lines.push(line);
    onProgress(line);
  };
  const { exitCode, how, isFound } = await runCommand("python3", args, { env: environment, onLine });
  if (exitCode === 0) return;
  const output = lines.join("\n");
  if (!isFound) {
    throw new KvError("KV_INSTALL_FAILED", "python3 was not found on PATH; NIXL is downloaded with pip", {
      hint: "install Python 3 with pip, such as: apt-get install python3 python3-pip",
    });
  }
  if (/No module named pip/.test(output)) {
    throw new KvError("KV_INSTALL_FAILED", "python3 has no pip; NIXL is downloaded with pip", {
      hint: "python3 -m ensurepip --user, or: apt-get install python3-pip",
    });
  }
  const reason = lines.findLast((line) => line.startsWith("ERROR:")) ?? lines.at(-1) ?? how;
  throw new KvError("KV_INSTALL_FAILED", `pip could not download NIXL: ${reason}`, {
    hint: `is the package index reachable? Try: python3 -m pip ${command.join(" ")}`,
    details: { output: lines.slice(-KEPT_LINES) },
  });
}
