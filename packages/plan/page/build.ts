import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";
import { pageHtml } from "./page-html.js";

const here = dirname(fileURLToPath(import.meta.url));

/** Builds the page `kv-plan.html` from source: the planner, the proof and the known models in one file. */
export async function buildPage(): Promise<string> {
  const folder = join(here, "../fixtures/models");
  const models = readdirSync(folder)
    .sort()
    .map((name) => [name.replace(/\.json$/, ""), JSON.parse(readFileSync(join(folder, name), "utf8"))]);
  const { outputFiles } = await build({
    entryPoints: [join(here, "page.ts")],
    ...{ bundle: true, write: false, minify: true, format: "iife", target: "es2022", charset: "utf8" },
    define: { KNOWN_MODELS: JSON.stringify(Object.fromEntries(models)) },
    alias: {
      "@kv/interface": join(here, "../../interface/src/index.ts"),
      "@kv/topology": join(here, "../../topology/src/index.ts"),
    },
  });
  return pageHtml(outputFiles[0]?.text ?? "");
}

const [, program, folder] = process.argv;
if (program === fileURLToPath(import.meta.url) && folder !== undefined) {
  writeFileSync(join(folder, "kv-plan.html"), await buildPage());
}
