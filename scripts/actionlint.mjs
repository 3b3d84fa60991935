// actionlint, the linter of GitHub's workflow files: found on PATH or in the user's cache, or built into that cache.
import { readdirSync } from "node:fs";
import { join } from "node:path";
import { goTool } from "./go-tools.mjs";
import { root } from "./setup.mjs";

export const { find: findActionlint, fetch: fetchActionlint } = goTool({
  name: "actionlint",
  version: "1.7.12",
  source: "github.com/rhysd/actionlint/cmd/actionlint",
  probe: ["-version"],
});

export const workflows = readdirSync(join(root, ".github/workflows")).map(
  (name) => `.github/workflows/${name}`,
);
