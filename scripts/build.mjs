// npm run build [-- --no-types | --only-types]: bundles all packages and the demo with esbuild, and writes their declarations with tsc.
// The entry points of a package are the files that its `exports` name (dist/X.js is built from src/X.ts) and its program, src/cli.ts.
import { execFile, spawnSync } from "node:child_process";
import { cpSync, existsSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join, relative } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { build } from "esbuild";
import { withSettingComments } from "./settings-comments.mjs";

const root = fileURLToPath(new URL("..", import.meta.url));
const packages = ["packages", "apps"].flatMap((place) =>
  readdirSync(join(root, place)).map((name) => join(root, place, name)),
);

/** The sources from which a package is built, relative to its folder; none for a package without a build. */
export function entryPoints(folder) {
  const { exports } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
  if (exports === undefined) return [];
  const built = Object.values(exports).map((target) => target.default ?? target);
  const names = built.flatMap((file) => /^\.\/dist\/(.+)\.js$/.exec(file)?.[1] ?? []);
  return [...names, "cli"].map((name) => `src/${name}.ts`).filter((path) => existsSync(join(folder, path)));
}

/** Bundles one package. What it depends on stays outside of the bundle. */
async function bundle(folder) {
  const entries = entryPoints(folder);
  if (entries.length === 0) return;
  const dist = join(folder, "dist");
  const outdir = `${dist}-${process.pid}`;
  await build({
    ...{
      entryPoints: entries.map((path) => join(folder, path)),
      outdir,
      outbase: join(folder, "src"),
      tsconfig: join(root, "tsconfig.base.json"),
    },
    ...{ bundle: true, splitting: true, packages: "external" },
    // A package has the sources beside its bundles.
    ...{ sourcemap: true, sourcesContent: false },
    ...{ format: "esm", platform: "node", target: "node20.19", logLevel: "warning" },
  });
  const page = join(folder, "page/build.ts");
  if (existsSync(page))
    await promisify(execFile)(process.execPath, ["--import", "tsx", page, outdir], { cwd: root });
  // Two builds may run at once. The declarations stay: a step of their own writes them.
  removeFiles(dist, (name) => !/\.d\.ts(\.map)?$/.test(name));
  cpSync(outdir, dist, { recursive: true });
  rmSync(outdir, { recursive: true });
}

function removeFiles(folder, isOld) {
  if (!existsSync(folder)) return;
  for (const entry of readdirSync(folder, { recursive: true, withFileTypes: true })) {
    if (entry.isFile() && isOld(entry.name)) rmSync(join(entry.parentPath, entry.name), { force: true });
  }
}

/** Declarations with settings, and the JSON schema that describes these. `kv-proxy` has all settings of `@kv/fleet`. */
const SETTINGS = [
  ["proxy/src/config/settings.d.ts", "proxy"],
  ["epp/src/config/settings.d.ts", "epp"],
  ["fleet/src/settings/fleet-settings.d.ts", "proxy"],
];

/** Writes the declarations of all packages: one program, a file for each source. */
function declarations() {
  const folder = mkdtempSync(join(tmpdir(), "kv-declarations-"));
  const tsc = join(root, "node_modules/typescript-7/bin/tsc");
  const args = [tsc, "-p", join(root, "tsconfig.declarations.json"), "--outDir", folder];
  const { status, stdout, error } = spawnSync(process.execPath, args, { cwd: root, encoding: "utf8" });
  if (status !== 0) throw new Error(`tsc ended with ${status}\n${stdout}${error ?? ""}`);
  for (const path of readdirSync(folder, { recursive: true }).filter((each) => each.endsWith(".map"))) {
    const [name, , ...rest] = path.split("/");
    const file = join(root, "packages", name, "dist", ...rest);
    const source = join(root, "packages", name, "src", ...rest).replace(/\.d\.ts\.map$/, ".ts");
    const map = { ...JSON.parse(readFileSync(join(folder, path), "utf8")) };
    writeFileSync(join(folder, path), JSON.stringify({ ...map, sources: [relative(dirname(file), source)] }));
  }
  for (const [path, name] of SETTINGS) {
    const file = join(folder, path);
    const map = JSON.parse(readFileSync(`${file}.map`, "utf8"));
    const schema = JSON.parse(readFileSync(join(root, "packages", name, "schema/config.json"), "utf8"));
    const { text, mappings } = withSettingComments(readFileSync(file, "utf8"), map.mappings, schema);
    writeFileSync(file, text);
    writeFileSync(`${file}.map`, JSON.stringify({ ...map, mappings }));
  }
  for (const name of readdirSync(folder)) {
    const dist = join(root, "packages", name, "dist");
    if (!existsSync(dist)) continue;
    removeFiles(dist, (file) => /\.d\.ts(\.map)?$/.test(file));
    cpSync(join(folder, name, "src"), dist, { recursive: true });
  }
  rmSync(folder, { recursive: true });
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  if (!process.argv.includes("--only-types")) await Promise.all(packages.map(bundle));
  // Programs run without declarations.
  if (!process.argv.includes("--no-types")) declarations();
}
