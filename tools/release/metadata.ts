// npm run release:metadata: writes `repository`, `homepage`, `bugs` and `engines` of the root
// package.json into every published package.
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { pathToFileURL } from "node:url";
import { type PackageManifest, publishedPackages, readManifest, root } from "./packages.js";

/** From the root's package.json. */
export function commonFields(folder: string): Partial<PackageManifest> {
  const { repository, engines } = readManifest(root);
  if (repository === undefined || engines === undefined)
    throw new Error("the root's package.json has no repository or no engines");
  const page = repository.url.replace(/^git\+/, "").replace(/\.git$/, "");
  return {
    repository: { ...repository, directory: folder },
    homepage: `${page}/tree/main/${folder}#readme`,
    bugs: `${page}/issues`,
    engines,
  };
}

if (import.meta.url === pathToFileURL(process.argv[1] ?? "").href) {
  for (const { folder } of publishedPackages().values()) {
    const path = join(root, folder, "package.json");
    const manifest = JSON.parse(readFileSync(path, "utf8")) as object;
    writeFileSync(
      path,
      `${JSON.stringify({ ...manifest, ...commonFields(folder) }, undefined, 2)}\n`,
    );
  }
}
