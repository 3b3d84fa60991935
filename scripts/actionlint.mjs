// actionlint, the linter of GitHub's workflow files: found on PATH or in the user's cache, or built into that cache.
import { spawnSync } from "node:child_process";
import { mkdirSync, readdirSync, renameSync, rmSync } from "node:fs";
import { homedir } from "node:os";
import { join } from "node:path";
import { root, run } from "./setup.mjs";

const VERSION = "1.7.12";
const cache = join(process.env.XDG_CACHE_HOME || join(homedir(), ".cache"), "kv-nixl");
const folder = join(cache, `actionlint-${VERSION}`);
const cached = join(folder, "bin", "actionlint");

export const workflows = readdirSync(join(root, ".github/workflows")).map(
  (name) => `.github/workflows/${name}`,
);

/** The command, or undefined where the machine has none. Fetches nothing. */
export function findActionlint() {
  return [cached, "actionlint"].find((command) => spawnSync(command, ["-version"]).status === 0);
}

/** The command, which Go builds through its module proxy where the machine has none. Go checks the module against its checksum database. */
export async function fetchActionlint() {
  const found = findActionlint();
  if (found !== undefined) return found;
  const go = ["go", "/usr/local/go/bin/go"].find((command) => spawnSync(command, ["version"]).status === 0);
  if (go === undefined) throw new Error("actionlint is missing, and so is Go, which builds it: install Go");
  process.stderr.write(`build actionlint ${VERSION} (once) …\n`);
  const work = join(cache, `actionlint-${process.pid}`);
  try {
    mkdirSync(join(work, "bin"), { recursive: true });
    const env = { ...process.env, GOBIN: join(work, "bin") };
    await run(go, ["install", `github.com/rhysd/actionlint/cmd/actionlint@v${VERSION}`], { env });
    rmSync(folder, { recursive: true, force: true });
    renameSync(work, folder);
  } finally {
    rmSync(work, { recursive: true, force: true });
  }
  return cached;
}
