import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";
import { plannerHtml } from "./planner-html.js";

const here = dirname(fileURLToPath(import.meta.url));

export async function buildPlanner(): Promise<string> {
  const folder = join(here, "../models");
  const models = readdirSync(folder)
    .sort()
    .map((name) => [
      name.replace(/\.json$/, ""),
      JSON.parse(readFileSync(join(folder, name), "utf8")),
    ]);
  return plannerHtml(
    await bundled("planner.ts", { KNOWN_MODELS: JSON.stringify(Object.fromEntries(models)) }),
  );
}

/** The script of `kv-plan --html` pages. */
export function buildReportScript(): Promise<string> {
  return bundled("report-page.ts");
}

async function bundled(entry: string, define: Record<string, string> = {}): Promise<string> {
  const { outputFiles } = await build({
    entryPoints: [join(here, entry)],
    define,
    tsconfig: join(here, "../../../tsconfig.json"),
    bundle: true,
    write: false,
    minify: true,
    format: "iife",
    target: "es2022",
    charset: "utf8",
  });
  return outputFiles[0]?.text ?? "";
}

const [, program, folder] = process.argv;
if (program === fileURLToPath(import.meta.url) && folder !== undefined) {
  writeFileSync(join(folder, "kv-plan.html"), await buildPlanner());
  writeFileSync(join(folder, "report-page.js"), await buildReportScript());
}
