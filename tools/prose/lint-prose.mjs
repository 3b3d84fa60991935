// npm run lint:prose [-- FILE …]: checks the prose of the pages with vale, by the rules of
// tools/prose.
import { execFileSync } from "node:child_process";
import { existsSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { goTool } from "../setup/go-tools.mjs";
import { root, runInTerminal } from "../setup/setup.mjs";

const vale = goTool({
  name: "vale",
  version: "3.21.0",
  source: "github.com/vale-cli/vale/v3/cmd/vale",
  probe: ["--version"],
});

/** The command, or undefined where it would have to be fetched first. */
export const findVale = vale.find;

/** The pages of this repository: all Markdown but the texts of others. */
const pages = () =>
  execFileSync("git", ["ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"], {
    cwd: root,
    encoding: "utf8",
  })
    .split("\0")
    .filter(
      (path) => path !== "" && !path.endsWith("ATTRIBUTIONS.md") && existsSync(join(root, path)),
    );

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const requested = process.argv.slice(2);
  const files = requested.length > 0 ? requested : pages();
  const args = ["--config=tools/prose/vale.ini", "--output=line", ...files];
  process.exitCode = await runInTerminal(await vale.fetch(), args);
}
