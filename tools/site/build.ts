import {
  copyFileSync,
  cpSync,
  existsSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  rmSync,
  writeFileSync,
} from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { Application } from "typedoc";
import { build } from "vitepress";
import { buildPlanner } from "../../packages/kv-plan/page/build.js";
import { ICON_SVG, ICON_URL } from "../../packages/kv-plan/src/render/render-html.js";
import { root } from "../repository/source-files.js";
import { linked, readPages, slugOf, withDiagrams } from "./pages.js";
import { sidebarOf } from "./sidebar.js";

// npm run docs [-- FOLDER]: builds the documentation site: the pages of docs/ and the READMEs, with
// search; the reference of all packages; kv-plan.

interface Markdown {
  readonly renderer: { readonly rules: Record<"code_block" | "code_inline" | "fence", Render> };
}
type Render = (...args: unknown[]) => string;

/**
 * Long paths and names in code may break between their words; an indented block looks as a fenced
 * one. The site's configuration has this text.
 */
function configureMarkdown({ renderer: { rules } }: Markdown): void {
  const render = rules.code_inline;
  rules.code_inline = (...args) =>
    render(...args).replace(/(?<=>)[^<]{19,}/, (text) =>
      text.replace(/(?<=\w[/_.:-])(?=[a-z])/gi, "<wbr>"),
    );
  rules.code_block = rules.fence;
}

/** Empties the folder. Returns the links that lead nowhere. */
export async function buildSite(out: string): Promise<readonly string[]> {
  // Inside tools, where VitePress and Vue are installed.
  const work = join(root, "tools/bundle/site");
  rmSync(work, { recursive: true, force: true });
  rmSync(out, { recursive: true, force: true });
  const { repository } = JSON.parse(readFileSync(join(root, "package.json"), "utf8")) as {
    repository: { url: string };
  };
  const plan = join(root, "packages/kv-plan/package.json");
  const { version } = JSON.parse(readFileSync(plan, "utf8")) as { version: string };
  const home = repository.url.replace(/^git\+/, "").replace(/\.git$/, "");
  const dead: string[] = [];
  const { pages, files } = readPages();
  const write = (path: string, text: string) => {
    mkdirSync(dirname(join(work, path)), { recursive: true });
    writeFileSync(join(work, path), text);
  };
  for (const page of pages) write(page.target, withDiagrams(linked(page, pages, home, dead)));
  for (const file of files) {
    const path = join(work, file.slice("docs/".length));
    mkdirSync(dirname(path), { recursive: true });
    copyFileSync(join(root, file), path);
  }
  const config = {
    title: "@kv",
    description: "Prefill/decode disaggregation that is compatible with vLLM, for Node",
    head: [["link", { rel: "icon", href: ICON_URL }]],
    outDir: out,
    cacheDir: join(root, "node_modules/.cache/vitepress"),
    // Links are checked before, with their anchors.
    ignoreDeadLinks: true,
    // As the pictures, which follow the reader's system.
    appearance: "force-auto",
    themeConfig: {
      search: { provider: "local" },
      nav: [
        { text: "Errors", link: "/errors" },
        { text: "Reference", link: "/reference/index.html", target: "_self" },
        { text: "kv-plan", link: "/planner.html", target: "_self" },
        { text: version, link: "/releasing" },
      ],
      sidebar: sidebarOf(pages),
    },
  };
  // As on the repository's web pages, so that links hold in both.
  const slugify = `const slugify = ${slugOf.toString()};`;
  write(
    ".vitepress/config.mjs",
    `${slugify}\n${configureMarkdown.toString()}\nexport default { ...${JSON.stringify(config)}, markdown: { anchor: { slugify }, config: configureMarkdown } };\n`,
  );
  cpSync(join(root, "tools/site/theme"), join(work, ".vitepress/theme"), { recursive: true });
  mkdirSync(join(work, "public"), { recursive: true });
  copyFileSync(
    fileURLToPath(import.meta.resolve("@mermaid-js/tiny")),
    join(work, "public/mermaid.js"),
  );
  await build(work);
  writeFileSync(join(out, "icon.svg"), ICON_SVG);
  await reference(join(out, "reference"), join(out, "icon.svg"));
  writeFileSync(join(out, "planner.html"), await buildPlanner());
  rmSync(work, { recursive: true, force: true });
  return dead;
}

async function reference(out: string, favicon: string): Promise<void> {
  const entryPoints = readdirSync(join(root, "packages")).flatMap((name) => {
    const folder = join(root, "packages", name);
    const manifest = join(folder, "package.json");
    if (!existsSync(manifest)) return [];
    const { private: isPrivate, exports = {} } = JSON.parse(readFileSync(manifest, "utf8")) as {
      private?: boolean;
      exports?: Record<string, unknown>;
    };
    if (isPrivate === true) return [];
    return Object.keys(exports).flatMap((path) => {
      const name = path === "." ? "index" : path.slice(2);
      return [`${name}.ts`, `${name}/index.ts`]
        .map((file) => join(folder, "src", file))
        .filter(existsSync)
        .slice(0, 1);
    });
  });
  const app = await Application.bootstrap({
    entryPoints,
    out,
    name: "@kv reference",
    tsconfig: join(root, "tsconfig.json"),
    favicon,
    readme: "none",
    // The types were checked before.
    skipErrorChecking: true,
    excludeExternals: true,
    disableSources: true,
    disableGit: true,
    logLevel: "Error",
    basePath: root,
  });
  const project = await app.convert();
  if (project === undefined) throw new Error("TypeDoc could not read the packages");
  // A module has the name by which it is imported.
  for (const module of project.children ?? []) {
    module.name = module.name.replace(/^packages\/([\w-]+)\/src/, "@kv/$1").replace(/\/index$/, "");
  }
  await app.generateDocs(project, out);
}

if (process.argv[1] === import.meta.filename) {
  const out = process.argv[2] ?? join(root, "build/site");
  const dead = await buildSite(out);
  for (const link of dead) console.error(`dead link: ${link}`);
  console.log(out);
  process.exitCode = dead.length === 0 ? 0 : 1;
}
