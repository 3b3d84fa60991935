import { cp, mkdir, readdir, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { type PageCommand, pageCommands } from "../docs/page-commands.js";
import { isShown, type PageOutput, pageOutputs } from "../docs/page-outputs.js";
import { packForInstall } from "../pack/install.js";
import { root } from "../repository/source-files.js";
import { type Page, readPages } from "../site/pages.js";
import { run } from "./tree.js";

const INSTALL = /^npm (?:run pack --|install) (.*@kv\/.*)$/;

/** Pages of docs/ that begin with an install, and the commands of their blocks. */
function installPages(): { page: Page; line: string; commands: readonly PageCommand[] }[] {
  const pages = readPages().pages.filter(({ source }) => source.startsWith("docs/"));
  return pages.flatMap((page) => {
    const own = pageCommands([page]);
    const at = own.findIndex(({ line }) => INSTALL.test(line));
    const line = INSTALL.exec(own[at]?.line ?? "")?.[1];
    return line === undefined ? [] : [{ page, line, commands: own.slice(at + 1) }];
  });
}

/**
 * Follows each such page from an empty folder, with what a checkout packs. A program that needs
 * servers, or another machine, only says its version.
 */
export async function pageProblems(
  work: string,
  { nixl }: { readonly nixl: boolean },
): Promise<readonly string[]> {
  const problems: string[] = [];
  for (const [at, { page, line, commands }] of installPages().entries()) {
    const folder = join(work, String(at));
    try {
      await mkdir(folder, { recursive: true });
      await writeFile(
        join(folder, "package.json"),
        JSON.stringify({ private: true, type: "module" }),
      );
      const install = await packForInstall(line.split(" "), join(work, `tarballs-${at}`), () => {});
      await run("bash", ["-c", install], { cwd: folder });
      await copyExamples(folder);
      const outputs = pageOutputs([page]);
      for (const command of commands)
        problems.push(...(await commandProblems(command, { outputs, folder, nixl })));
    } catch (error) {
      problems.push(`${page.source}: ${(error as Error).message}`);
    }
  }
  return problems;
}

/** What the pages tell their readers to copy. */
async function copyExamples(folder: string): Promise<void> {
  await mkdir(join(folder, "examples"));
  const files = await readdir(join(root, "examples"));
  for (const file of files.filter((name) => name.endsWith(".mjs")))
    await cp(join(root, "examples", file), join(folder, "examples", file));
}

async function commandProblems(
  { page, line, needs }: PageCommand,
  at: { readonly outputs: readonly PageOutput[]; readonly folder: string; readonly nixl: boolean },
): Promise<string[]> {
  const [first = "", ...args] = line.split(" ");
  const isExample = /^node examples\/\S+$/.test(line);
  if (!isExample && first !== "npx") return [];
  if (!at.nixl && /nixl/.test(line)) return [];

  const given = needs === undefined || isExample ? args : [...args.slice(0, 2), "--version"];
  const printed = await run(first, given, { cwd: at.folder });
  if (!isExample) return [];
  return at.outputs
    .filter((output) => output.line === line && !isShown(output.text, printed))
    .map(({ text }) => `${page}: ${line} prints ${printed} and not ${text}`);
}
