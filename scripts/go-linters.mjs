// The linters that are written in Go: found on PATH or in the user's cache, or built into that cache.
import { execFileSync, spawnSync } from "node:child_process";
import { existsSync, mkdirSync, readdirSync, renameSync, rmSync } from "node:fs";
import { homedir } from "node:os";
import { join } from "node:path";
import { root, run } from "./setup.mjs";

const cache = join(process.env.XDG_CACHE_HOME || join(homedir(), ".cache"), "kv-nixl");

/** Checks GitHub's workflow files. */
export const actionlint = {
  name: "actionlint",
  module: "github.com/rhysd/actionlint/cmd/actionlint",
  version: "1.7.12",
};
/** Checks the prose of the pages. */
export const vale = { name: "vale", module: "github.com/vale-cli/vale/v3/cmd/vale", version: "3.21.0" };

export const workflows = readdirSync(join(root, ".github/workflows")).map(
  (name) => `.github/workflows/${name}`,
);

/** The pages of this repository: all Markdown but the texts of others. */
export const pages = () =>
  execFileSync("git", ["ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"], {
    cwd: root,
    encoding: "utf8",
  })
    .split("\0")
    .filter((path) => path !== "" && !path.endsWith("ATTRIBUTIONS.md") && existsSync(join(root, path)));

const answers = (command, ...args) => spawnSync(command, args).status === 0;
const folderOf = ({ name, version }) => join(cache, `${name}-${version}`);

/** The command of a linter, or undefined where the machine has none. Fetches nothing. */
export function findLinter(linter) {
  const { name } = linter;
  return [join(folderOf(linter), "bin", name), name].find((command) => answers(command, "--version"));
}

/** The command of a linter, which Go builds through its module proxy where the machine has none. Go checks the module against its checksum database. */
export async function fetchLinter(linter) {
  const found = findLinter(linter);
  if (found !== undefined) return found;
  const { name, module, version } = linter;
  const go = ["go", "/usr/local/go/bin/go"].find((command) => answers(command, "version"));
  if (go === undefined) throw new Error(`${name} is missing, and so is Go, which builds it: install Go`);
  process.stderr.write(`build ${name} ${version} (once) …\n`);
  const folder = folderOf(linter);
  const work = join(cache, `${name}-${process.pid}`);
  try {
    mkdirSync(join(work, "bin"), { recursive: true });
    await run(go, ["install", `${module}@v${version}`], {
      env: { ...process.env, GOBIN: join(work, "bin") },
    });
    rmSync(folder, { recursive: true, force: true });
    renameSync(work, folder);
  } finally {
    rmSync(work, { recursive: true, force: true });
  }
  return join(folder, "bin", name);
}
