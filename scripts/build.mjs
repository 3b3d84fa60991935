// npm run build [-- --no-types | --only-types]: bundles all packages and the demo with esbuild, and writes their declarations with tsc.
// The entry points of a package are the files that its `exports` name (dist/X.js is built from src/X.ts) and its program, src/cli.ts.
import { execFile, spawnSync } from "node:child_process";
import {
  cpSync,
  existsSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  writeFileSync,
} from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join, relative } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { build } from "esbuild";

const root = fileURLToPath(new URL("..", import.meta.url));
const packages = ["packages", "apps"].flatMap((place) =>
  readdirSync(join(root, place)).map((name) => join(root, place, name)),
);

/** Bundles one package. What it depends on stays outside of the bundle. */
async function bundle(folder, { exports = {} }) {
  const dist = join(folder, "dist");
  const outdir = `${dist}-${process.pid}`;
  const named = Object.values(exports).map((target) => target.default ?? target);
  const sources = named.flatMap((file) => /^\.\/dist\/(.+)\.js$/.exec(file)?.[1] ?? []);
  const entryPoints = [...new Set([...sources, "cli", "cli/cli"])]
    .map((name) => join(folder, "src", `${name}.ts`))
    .filter((path) => existsSync(path));
  await build({
    ...{ entryPoints, outdir, outbase: join(folder, "src"), tsconfig: join(root, "tsconfig.base.json") },
    ...{ bundle: true, splitting: true, packages: "external", sourcemap: true },
    ...{ format: "esm", platform: "node", target: "node20.19", logLevel: "warning" },
  });
  const page = join(folder, "page/build.ts");
  if (existsSync(page))
    await promisify(execFile)(process.execPath, ["--import", "tsx", page, outdir], { cwd: root });
  // Two builds may run at once.
  rmSync(dist, { recursive: true, force: true });
  renameSync(outdir, dist);
}

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
  for (const name of readdirSync(folder)) {
    const dist = join(root, "packages", name, "dist");
    if (existsSync(dist)) cpSync(join(folder, name, "src"), dist, { recursive: true });
  }
  rmSync(folder, { recursive: true });
}

if (!process.argv.includes("--only-types")) {
  await Promise.all(
    packages.map((folder) => {
      const manifest = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
      return manifest.exports === undefined ? undefined : bundle(folder, manifest);
    }),
  );
}
// Programs run without declarations.
if (!process.argv.includes("--no-types")) declarations();
