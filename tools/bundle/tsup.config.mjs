// How tsup builds each package. Run in the package's folder: `tsup --config
// ../../tools/bundle/tsup.config.mjs`. What is built are the files that its `exports` name
// (dist/X.js is built from src/X.ts) and its program, src/cli.ts.
import { existsSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { defineConfig } from "tsup";

/**
 * The sources from which the package in `folder` is built: by the name of what is built, without
 * dist/ and .js.
 */
export function entryPoints(folder) {
  const { exports = {} } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
  const files = Object.values(exports).map((target) => target.default ?? target);
  const names = files.flatMap((file) => /^\.\/dist\/(.+)\.js$/.exec(file)?.[1] ?? []);
  const entries = [...names, "cli"].map((name) => [name, `src/${name}.ts`]);
  return Object.fromEntries(entries.filter(([, path]) => existsSync(join(folder, path))));
}

export default defineConfig({
  entry: entryPoints(process.cwd()),
  tsconfig: fileURLToPath(new URL("tsconfig.base.json", import.meta.url)),
  format: "esm",
  platform: "node",
  skipNodeModulesBundle: true,
  target: "node20.19",
  splitting: true,
  // Deno and Bun know `node:` too.
  removeNodeProtocol: false,
  sourcemap: true,
  // The declarations stay: tsc writes them (declarations.mjs).
  clean: ["**/*.js", "**/*.js.map"],
  esbuildOptions(options) {
    // A package has the sources beside its bundles.
    options.sourcesContent = false;
  },
});
