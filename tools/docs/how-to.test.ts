import { mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import ts from "typescript";
import { describe, expect, test } from "vitest";

/** Follows the how-to pages: writes out their files as a reader would, type-checks them, and runs their tests. */
const root = fileURLToPath(new URL("../../", import.meta.url));
const PAGES = ["add-a-connector", "add-a-platform", "add-a-transport"];

/** The files of a page. Each is a line with the path in bold code, an empty line, and a fenced block. */
function filesOf(text: string): Map<string, string> {
  const blocks = text.matchAll(/^\*\*`([\w./-]+)`\*\*\n\n```\w+\n([\s\S]*?)^```$/gm);
  return new Map(Array.from(blocks, ([, path = "", content = ""]) => [path, content]));
}

/** The compiler's errors in the files, with this repository's settings. */
function compileErrors(paths: readonly string[]): string[] {
  const { config } = ts.readConfigFile(join(root, "tsconfig.json"), ts.sys.readFile) as { config: object };
  const { options } = ts.parseJsonConfigFileContent({ ...config, include: [], files: paths }, ts.sys, root);
  const found = ts.getPreEmitDiagnostics(ts.createProgram(paths, options));
  return found
    .filter(({ file }) => file === undefined || paths.includes(file.fileName))
    .map(
      ({ file, messageText }) => `${file?.fileName}: ${ts.flattenDiagnosticMessageText(messageText, "\n")}`,
    );
}

const followed = PAGES.map((page) => {
  const folder = join(root, "build/how-to", page);
  const text = readFileSync(join(root, "docs/how-to", `${page}.md`), "utf8");
  const files = filesOf(text);
  rmSync(folder, { recursive: true, force: true });
  for (const [path, content] of files) {
    mkdirSync(dirname(join(folder, path)), { recursive: true });
    writeFileSync(join(folder, path), content);
  }
  const sources = [...files.keys()].filter((path) => path.endsWith(".ts")).map((path) => join(folder, path));
  return { page, text, files, sources };
});

test("the files of the pages type-check", { timeout: 240_000 }, () => {
  expect(compileErrors(followed.flatMap(({ sources }) => sources))).toEqual([]);
});

describe.each(followed)("docs/how-to: $page", async ({ text, files, sources }) => {
  test("every fenced block is a file that is tested here", () => {
    const fences = text.match(/^```(?!mermaid)\w+$/gm) ?? [];
    expect(files.size).toBeGreaterThan(0);
    expect(fences.length).toBe(files.size);
  });
  for (const path of sources.filter((source) => source.endsWith(".test.ts"))) await import(path);
});
