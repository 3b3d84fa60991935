import { createHash } from "node:crypto";
import { mkdir, readdir, readFile } from "node:fs/promises";
import { join } from "node:path";
import { KvError } from "@kv/interface";
import { runCommand } from "@kv/program";
import type { Environment } from "../environment.js";
import { type PinnedWheel, PYTHON_VERSION } from "./wheels.js";

/**
 * Only these bytes, whose SHA-256 is the pinned one, are unpacked: the file may have changed since.
 */
export interface VerifiedWheel {
  readonly path: string;
  readonly bytes: Uint8Array;
}

/** Downloads with pip. Rejects with `KV_INSTALL_FAILED`. */
export async function downloadWheel(
  wheel: PinnedWheel,
  into: string,
  environment: Environment,
  onProgress: (line: string) => void,
): Promise<VerifiedWheel> {
  await mkdir(into, { recursive: true });
  await pip(downloadCommand(wheel), ["--dest", into], { environment, onProgress });
  const files = (await readdir(into)).filter((name) => name.endsWith(".whl"));
  const [file] = files;
  if (file === undefined || files.length !== 1) {
    throw new KvError(
      "KV_INSTALL_FAILED",
      `pip left ${files.length} wheels for ${wheel.requirement}, not one`,
    );
  }
  const hint = "check which index pip uses: python3 -m pip config list";
  return await readVerified(join(into, file), wheel, hint);
}

/** pip's arguments that download the wheel into the current folder. */
export function downloadCommand({ platform, requirement }: PinnedWheel): string[] {
  const selection = ["--no-deps", "--only-binary=:all:", "--python-version", PYTHON_VERSION];
  return ["download", ...selection, "--platform", platform, requirement];
}

/** Rejects with `KV_INSTALL_FAILED`, which names the SHA-256 found and the pinned one. */
export async function readVerified(
  path: string,
  wheel: PinnedWheel,
  hint: string,
): Promise<VerifiedWheel> {
  const bytes = await readFile(path).catch((error: Error) => {
    throw new KvError("KV_INSTALL_FAILED", `cannot read the wheel ${path}: ${error.message}`);
  });
  const actual = createHash("sha256").update(bytes).digest("hex");
  if (actual === wheel.sha256) return { path, bytes };
  throw new KvError(
    "KV_INSTALL_FAILED",
    `${path} is not the wheel of ${wheel.requirement}: it has SHA-256 ${actual}, but ${wheel.sha256} is pinned; it is not used`,
    { hint },
  );
}

const KEPT_LINES = 50;

/**
 * Uses the user's configuration of pip. Error messages suggest the command without `options`.
 * Rejects with `KV_INSTALL_FAILED`.
 */
async function pip(
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
  const { exitCode, how, isFound } = await runCommand("python3", args, {
    env: environment,
    onLine,
  });
  if (exitCode === 0) return;
  const output = lines.join("\n");
  if (!isFound) {
    throw new KvError(
      "KV_INSTALL_FAILED",
      "python3 was not found on PATH; NIXL is downloaded with pip",
      {
        hint: "install Python 3 with pip, such as: apt-get install python3 python3-pip",
      },
    );
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
