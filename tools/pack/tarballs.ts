import { execFile } from "node:child_process";
import { mkdir, readdir, readFile } from "node:fs/promises";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";

/** The fields of a package.json that these tests read. */
export interface Manifest {
  readonly name: string;
  readonly dependencies?: Readonly<Record<string, string>>;
  readonly optionalDependencies?: Readonly<Record<string, string>>;
  readonly peerDependencies?: Readonly<Record<string, string>>;
  readonly exports: Readonly<Record<string, unknown>>;
  readonly version: string;
  readonly os?: readonly string[];
  readonly cpu?: readonly string[];
  readonly libc?: readonly string[];
  readonly scripts?: Readonly<Record<string, string>>;
  readonly private?: boolean;
}

export const run = promisify(execFile);
export const root = fileURLToPath(new URL("../..", import.meta.url));

const manifestOf = async (folder: string): Promise<Manifest> =>
  JSON.parse(await readFile(join(folder, "package.json"), "utf8")) as Manifest;

const own = (await manifestOf(root)) as Manifest & {
  readonly packageManager: string;
  readonly devDependencies: Readonly<Record<string, string>>;
};
export const vitestVersion = own.devDependencies["vitest"] ?? "";

const folders = (
  await Promise.all(
    ["packages", "native/npm"].map(async (place) =>
      (await readdir(join(root, place))).map((name) => join(root, place, name)),
    ),
  )
).flat();
/** The published packages by name. */
export const manifests = new Map(
  (await Promise.all(folders.map(manifestOf)))
    .filter((manifest) => manifest.private !== true)
    .map((manifest) => [manifest.name, manifest]),
);

export const pnpm = (args: readonly string[], cwd: string) =>
  run("npx", ["--yes", own.packageManager, ...args], { cwd });

/** Packs published packages, by default all, with `pnpm pack` into `folder`. Returns the tarballs' paths by package name. */
export async function packAll(
  folder: string,
  names: Iterable<string> = manifests.keys(),
): Promise<ReadonlyMap<string, string>> {
  await mkdir(folder, { recursive: true });
  const { stdout } = await pnpm(
    [
      "--recursive",
      ...[...names].flatMap((name) => ["--filter", name]),
      ...["pack", "--json", "--pack-destination", folder],
    ],
    root,
  );
  const packed = JSON.parse(stdout) as { name: string; filename: string }[];
  return new Map(packed.map(({ name, filename }) => [name, filename]));
}

/** Whether the package is for one platform, so that it cannot be installed on others. */
export const isForPlatform = (name: string): boolean => manifests.get(name)?.cpu !== undefined;

/** The packages and all packages of this repository that they depend on, which are not in a registry. */
export function closure(names: readonly string[], seen = new Set<string>()): Set<string> {
  for (const name of names) {
    const manifest = manifests.get(name);
    if (manifest === undefined || seen.has(name)) continue;
    seen.add(name);
    closure(Object.keys({ ...manifest.dependencies, ...manifest.optionalDependencies }), seen);
  }
  return seen;
}
