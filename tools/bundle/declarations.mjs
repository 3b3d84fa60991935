// Writes the declarations of all packages into their dist/: one program of tsc, a file for each
// source.
import { spawnSync } from "node:child_process";
import {
  cpSync,
  existsSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  writeFileSync,
} from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join, relative } from "node:path";
import { fileURLToPath } from "node:url";
import { withSettingComments } from "./settings-comments.mjs";

const root = fileURLToPath(new URL("../..", import.meta.url));
/**
 * Declarations with settings, and the JSON schema that describes these. `kv-proxy` has all settings
 * of `@kv/fleet`.
 */
const SETTINGS = [
  ["proxy/src/config/settings.d.ts", "proxy"],
  ["epp/src/config/settings.d.ts", "epp"],
  ["fleet/src/settings/fleet-settings.d.ts", "proxy"],
];

const folder = mkdtempSync(join(tmpdir(), "kv-declarations-"));
const args = [
  join(root, "node_modules/typescript-7/bin/tsc"),
  "-p",
  join(root, "tools/bundle/tsconfig.declarations.json"),
  "--outDir",
  folder,
];
const { status } = spawnSync(process.execPath, args, { cwd: root, stdio: "inherit" });
if (status !== 0) throw new Error(`tsc ended with ${status}`);
for (const path of readdirSync(folder, { recursive: true }).filter((each) =>
  each.endsWith(".map"),
)) {
  const [name, , ...rest] = path.split("/");
  const file = join(root, "packages", name, "dist", ...rest);
  const source = join(root, "packages", name, "src", ...rest).replace(/\.d\.ts\.map$/, ".ts");
  const map = JSON.parse(readFileSync(join(folder, path), "utf8"));
  map.sources = [relative(dirname(file), source)];
  writeFileSync(join(folder, path), JSON.stringify(map));
}
// The core alone has none of them.
for (const [path, name] of SETTINGS.filter((each) => existsSync(join(folder, each[0])))) {
  const file = join(folder, path);
  const map = JSON.parse(readFileSync(`${file}.map`, "utf8"));
  const schema = JSON.parse(
    readFileSync(join(root, "packages", name, "schema/config.json"), "utf8"),
  );
  const { text, mappings } = withSettingComments(readFileSync(file, "utf8"), map.mappings, schema);
  writeFileSync(file, text);
  writeFileSync(`${file}.map`, JSON.stringify({ ...map, mappings }));
}
for (const name of readdirSync(folder)) {
  const dist = join(root, "packages", name, "dist");
  for (const path of readdirSync(dist, { recursive: true }).filter((each) =>
    /\.d\.ts(\.map)?$/.test(each),
  ))
    rmSync(join(dist, path));
  cpSync(join(folder, name, "src"), dist, { recursive: true });
}
rmSync(folder, { recursive: true });
