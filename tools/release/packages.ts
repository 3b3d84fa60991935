import { existsSync, readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

export interface PackageManifest {
  readonly name: string;
  readonly version: string;
  readonly description?: string;
  readonly private?: boolean;
  readonly license?: string;
  readonly main?: string;
  readonly types?: string;
  readonly packageManager?: string;
  readonly files?: readonly string[];
  readonly bin?: Readonly<Record<string, string>>;
  readonly exports?: Readonly<Record<string, string | Readonly<Record<string, string>>>>;
  readonly engines?: Readonly<Record<string, string>>;
  readonly os?: readonly string[];
  readonly cpu?: readonly string[];
  readonly libc?: readonly string[];
  readonly keywords?: readonly string[];
  readonly repository?: {
    readonly type: string;
    readonly url: string;
    readonly directory?: string;
  };
  readonly homepage?: string;
  readonly bugs?: string;
  readonly scripts?: Readonly<Record<string, string>>;
  readonly dependencies?: Readonly<Record<string, string>>;
  readonly optionalDependencies?: Readonly<Record<string, string>>;
  readonly devDependencies?: Readonly<Record<string, string>>;
  readonly peerDependencies?: Readonly<Record<string, string>>;
}

export interface PublishedPackage {
  /** From the root of the repository, with slashes. */
  readonly folder: string;
  readonly manifest: PackageManifest;
}

export const root = fileURLToPath(new URL("../..", import.meta.url));

export const readManifest = (folder: string): PackageManifest =>
  JSON.parse(readFileSync(join(folder, "package.json"), "utf8")) as PackageManifest;

/** By name. Each comes after the packages that it depends on. */
export function publishedPackages(tree: string = root): ReadonlyMap<string, PublishedPackage> {
  const folders = ["native/npm", "packages"]
    .flatMap((place) => readdirSync(join(tree, place)).map((name) => `${place}/${name}`))
    .filter((folder) => existsSync(join(tree, folder, "package.json")));
  const found = new Map(
    folders
      .map((folder) => ({ folder, manifest: readManifest(join(tree, folder)) }))
      .filter(({ manifest }) => manifest.private !== true)
      .map((each) => [each.manifest.name, each]),
  );
  const ordered = new Map<string, PublishedPackage>();
  const visit = (name: string) => {
    const each = found.get(name);
    if (each === undefined || ordered.has(name)) return;
    const { dependencies, optionalDependencies } = each.manifest;
    for (const dependency of Object.keys({ ...dependencies, ...optionalDependencies }))
      visit(dependency);
    ordered.set(name, each);
  };
  for (const name of [...found.keys()].sort()) visit(name);
  return ordered;
}
