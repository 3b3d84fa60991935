import { spawnSync } from "node:child_process";
import { existsSync, readdirSync, readFileSync, statSync } from "node:fs";
import { dirname, join } from "node:path";
import { elfNeeds, violations } from "../../native/scripts/elf-needs.mjs";
import { EXPORTS, GLIBC } from "../../native/scripts/platform-packages.mjs";
import { commonFields } from "./metadata.js";
import { type PackageManifest, readManifest } from "./packages.js";

const MIB = 1 << 20;
/** Of ELF headers, by the names of package.json. */
const MACHINES: Readonly<Record<string, RegExp>> = { x64: /X86-64/, arm64: /AArch64/ };

/** What `npm run build:platforms` and `npm run build:libs` make. */
const BUILT_SEPARATELY = /\.node$|^(\.\/)?dist\/(nixl|libfabric)-/;

export function tarballLimitBytes({ name, cpu }: PackageManifest): number {
  if (/^@kv\/nixl-libs/.test(name)) return 100 * MIB;
  return cpu === undefined ? MIB : 4 * MIB;
}

/**
 * Of an unpacked tarball of the package in `folder`. `addons: false` leaves out what is built
 * separately.
 */
export function tarballProblems(
  unpacked: string,
  folder: string,
  { addons }: { readonly addons: boolean },
): string[] {
  const manifest = readManifest(unpacked);
  const files = readdirSync(unpacked, { recursive: true, encoding: "utf8" }).filter((path) =>
    statSync(join(unpacked, path)).isFile(),
  );
  const missing = requiredFiles(manifest)
    .filter((path) => addons || !BUILT_SEPARATELY.test(path))
    .filter((path) => !existsSync(join(unpacked, path)));
  return [
    ...missing.map((path) => `has no ${path}`),
    ...manifestProblems(manifest, folder),
    ...files
      .filter((path) => addons && path.endsWith(".node"))
      .flatMap((path) => addonProblems(unpacked, path, manifest)),
    ...files
      .filter((path) => path.endsWith(".d.ts"))
      .flatMap((path) => declarationProblems(unpacked, path)),
    ...readmeProblems(join(unpacked, "README.md")),
  ];
}

function requiredFiles({
  main,
  types,
  bin = {},
  exports = {},
  files = [],
}: PackageManifest): string[] {
  const exported = Object.values(exports).flatMap((target) =>
    typeof target === "string" ? [target] : Object.values(target),
  );
  const named = [main, types, ...Object.values(bin), ...exported].filter(
    (path) => path !== undefined,
  );
  const listed = files.filter((path) => !path.startsWith("!"));
  return [...new Set(["LICENSE", "README.md", "CHANGELOG.md", ...listed, ...named])];
}

function manifestProblems(manifest: PackageManifest, folder: string): string[] {
  const {
    name,
    version,
    scripts = {},
    keywords = [],
    license,
    dependencies,
    optionalDependencies,
  } = manifest;
  const ranges = Object.entries({ ...dependencies, ...optionalDependencies });
  const expected = Object.entries(commonFields(folder));
  const actual = manifest as unknown as Readonly<Record<string, unknown>>;
  return [
    // The package of NIXL's libraries has theirs too.
    ...(/^Apache-2\.0( AND |$)/.test(license ?? "") ? [] : [`has the license ${license}`]),
    ...(keywords.length === 0 ? ["has no keywords"] : []),
    ...["preinstall", "install", "postinstall", "prepare"]
      .filter((script) => scripts[script] !== undefined)
      .map((script) => `runs ${script} when it is installed`),
    ...expected
      .filter(([field, value]) => JSON.stringify(actual[field]) !== JSON.stringify(value))
      .map(([field]) => `has another ${field} than the repository; run: npm run release:metadata`),
    // The packages of the addon fit one version of their loader only.
    ...ranges
      .filter(([dependency, range]) =>
        dependency.startsWith(`${name}-`) ? range !== version : !/^[\^~>]/.test(range),
      )
      .map(([dependency, range]) => `depends on ${dependency} ${range}`),
  ];
}

function addonProblems(unpacked: string, path: string, { cpu }: PackageManifest): string[] {
  const file = join(unpacked, path);
  const target = cpu?.[0] ?? /linux-(x64|arm64)/.exec(path)?.[1] ?? "";
  const { stdout: machine } = spawnSync("readelf", ["--file-header", file], { encoding: "utf8" });
  return [
    ...(MACHINES[target]?.test(machine) ? [] : [`${path} is not for ${target}`]),
    ...violations(elfNeeds(file), { glibc: GLIBC, exported: EXPORTS }).map(
      (each) => `${path} ${each}`,
    ),
  ];
}

/** An editor follows a declaration to its source by the declaration's map. */
function declarationProblems(unpacked: string, path: string): string[] {
  const map = join(unpacked, `${path}.map`);
  if (!existsSync(map)) return [`has no map of ${path}`];
  const { sources } = JSON.parse(readFileSync(map, "utf8")) as {
    readonly sources: readonly string[];
  };
  return sources
    .filter((source) => !existsSync(join(dirname(map), source)))
    .map((source) => `${path}.map names ${source}, which is not in the tarball`);
}

/** The page of a registry resolves no relative link to another folder. */
function readmeProblems(readme: string): string[] {
  if (!existsSync(readme)) return [];
  const relative = readFileSync(readme, "utf8").matchAll(/\]\((\.\.?\/[^)]*)\)/g);
  return Array.from(relative, ([, link]) => `README.md links to ${link}`);
}
