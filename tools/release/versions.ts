import { readFileSync, writeFileSync } from "node:fs";
import { join, posix } from "node:path";
import { withInstallLines } from "../docs/page-parts.js";
import { publishedPackages, readManifest, root } from "./packages.js";
import { run } from "./tree.js";

/** Versions, ranges and CHANGELOGs. Returns the versions by package. */
export async function applyChangesets(tree: string): Promise<ReadonlyMap<string, string>> {
  await run(process.execPath, [join(root, "node_modules/@changesets/cli/bin.js"), "version"], {
    cwd: tree,
  });
  return versionsOf(tree);
}

export const versionsOf = (tree: string): ReadonlyMap<string, string> =>
  new Map([...publishedPackages(tree)].map(([name, { manifest }]) => [name, manifest.version]));

/** A registry shows READMEs without links to other folders, and installs from itself. */
export function writePublishedReadmes(tree: string): void {
  const page =
    readManifest(root)
      .repository?.url.replace(/^git\+/, "")
      .replace(/\.git$/, "") ?? "";
  for (const { folder } of publishedPackages(tree).values()) {
    const path = join(tree, folder, "README.md");
    const text = withInstallLines(readFileSync(path, "utf8"), true).replace(
      /\]\((\.\.?\/[^)#]*)(#[^)]*)?\)/g,
      (_, target: string, fragment = "") =>
        `](${page}/blob/main/${posix.normalize(posix.join(folder, target))}${fragment})`,
    );
    writeFileSync(path, text);
  }
}
