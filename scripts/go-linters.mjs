// The linters that Go builds, and what they read.
import { execFileSync } from "node:child_process";
import { existsSync, readdirSync } from "node:fs";
import { join } from "node:path";
import { goTool } from "./go-tools.mjs";
import { root } from "./setup.mjs";

/** Checks GitHub's workflow files. */
export const actionlint = goTool({
  name: "actionlint",
  version: "1.7.12",
  source: "github.com/rhysd/actionlint/cmd/actionlint",
  probe: ["-version"],
});

/** Checks the prose of the pages. */
export const vale = goTool({
  name: "vale",
  version: "3.21.0",
  source: "github.com/vale-cli/vale/v3/cmd/vale",
  probe: ["--version"],
});

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
