import { publishedPackages, readManifest, root } from "../release/packages.js";
import { pack } from "../release/tree.js";

export const vitestVersion = readManifest(root).devDependencies?.["vitest"] ?? "";

export const manifests = new Map(
  Array.from(publishedPackages(), ([name, { manifest }]) => [name, manifest] as const),
);

/** By default all. Returns the tarballs by package name. */
export const packAll = (folder: string, names: Iterable<string> = manifests.keys()) =>
  pack(root, [...names], folder);

export const isForPlatform = (name: string): boolean => manifests.get(name)?.cpu !== undefined;

/** With all of this repository that they depend on. */
export function closure(names: readonly string[], seen = new Set<string>()): Set<string> {
  for (const name of names) {
    const manifest = manifests.get(name);
    if (manifest === undefined || seen.has(name)) continue;
    seen.add(name);
    closure(Object.keys({ ...manifest.dependencies, ...manifest.optionalDependencies }), seen);
  }
  return seen;
}
