import { readFileSync } from "node:fs";
import { join } from "node:path";
import { root } from "../repository/source-files.js";

/**
 * Whether the packages are on a registry. Until then the pages install tarballs that a checkout
 * packs. `npx vitest run tools/docs/page-parts.test.ts -u` writes the pages.
 */
export const ON_A_REGISTRY = false;

const IN_A_CHECKOUT = "# in a checkout; prints the install line";
const INSTALL =
  /^(?: *# in a checkout; .*\n)?( *)(?:npm install|npm run pack --) ((?=.*@kv\/).*)$/gm;

/**
 * A page with its lines that install packages of this repository: from a registry, or from tarballs
 * of a checkout.
 */
export function withInstallLines(text: string, onRegistry: boolean = ON_A_REGISTRY): string {
  return text.replace(INSTALL, (_, indent: string, packages: string) =>
    onRegistry
      ? `${indent}npm install ${packages}`
      : `${indent}${IN_A_CHECKOUT}\n${indent}npm run pack -- ${packages}`,
  );
}

const EXAMPLE = /(^<!-- example: (examples\/[\w./-]+) -->\n+```\w+\n)[\s\S]*?(^```$)/gm;

/** The files of `examples/` that a page shows. */
export const examplesOn = (text: string): readonly string[] =>
  Array.from(text.matchAll(EXAMPLE), ([, , file = ""]) => file);

/** A page with the text of each example that it shows. */
export const withExamples = (text: string): string =>
  text.replace(
    EXAMPLE,
    (_, begin: string, file: string, end: string) =>
      begin + readFileSync(join(root, file), "utf8") + end,
  );

/**
 * A page with this table between its marks `<!-- NAME: made -->` and `<!-- end -->`. Throws where
 * it has no such marks.
 */
export function withMade(text: string, name: string, rows: readonly (readonly string[])[]): string {
  const begin = `<!-- ${name}: made -->\n`;
  const from = text.indexOf(begin);
  const to = text.indexOf("<!-- end -->", from);
  if (from < 0 || to < 0) throw new Error(`the page has no ${begin.trim()} before <!-- end -->`);
  const [head = [], ...rest] = rows;
  const lines = [head, head.map(() => "---"), ...rest].map((cells) => `| ${cells.join(" | ")} |\n`);
  return text.slice(0, from + begin.length) + lines.join("") + text.slice(to);
}
