import { publishedPackages, readManifest, root } from "../release/packages.js";
import { pack } from "../release/tree.js";

export const vitestVersion = readManifest(root).devDependencies?.["vitest"] ?? "";

/** The published packages by name. */
export const manifests = new Map(
  Array.from(publishedPackages(), ([name, { manifest }]) => [name, manifest] as const),
);

/**
 * Packs published packages, by default all, into `folder`. Returns the tarballs' paths by package
 * name.
 */
export const packAll = (folder: string, names: Iterable<string> = manifests.keys()) =>
  pack(root, [...names], folder);

/** Whether the package is for one platform, so that it cannot be installed on others. */
export const isForPlatform = (name: string): boolean => manifests.get(name)?.cpu !== undefined;

/**
 * The packages and all packages of this repository that they depend on, which are not in a
 * registry.
 */
export function closure(names: readonly string[], seen = new Set<string>()): Set<string> {
  for (const name of names) {
    const manifest = manifests.get(name);
    if (manifest === undefined || seen.has(name)) continue;
    seen.add(name);
    closure(Object.keys({ ...manifest.dependencies, ...manifest.optionalDependencies }), seen);
  }
  return seen;
}
