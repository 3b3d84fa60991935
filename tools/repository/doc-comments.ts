import { join } from "node:path";
import { fileURLToPath } from "node:url";
import ts from "typescript";
import { findDefaults } from "./option-defaults.js";
import { placeOf, publicProgram } from "./public-program.js";
import { root } from "./source-files.js";

/** A public name without a doc comment. */
export interface Undocumented {
  /** The short name of its package, such as `plan`. */
  readonly package: string;
  /** `file:line`, relative to the root. */
  readonly place: string;
  readonly name: string;
}

/**
 * Finds every export of every published package that has no doc comment. The entries are those of
 * `exports` in each package.json, taken from `src` in place of `dist`. A name that one package
 * exports again from another counts where it is declared.
 */
export function findUndocumented(
  base: string,
  { packages, checker, exportsOf } = publicProgram(base),
): Undocumented[] {
  const undocumented = packages.flatMap((name) => {
    const folder = `${join(base, "packages", name)}/`;
    return [...new Set(exportsOf(name))].flatMap((symbol) => {
      const declaration = declarationIn(folder, symbol);
      if (declaration === undefined || isDocumented(symbol, checker)) return [];
      return [{ package: name, place: placeOf(base, declaration), name: symbol.name }];
    });
  });
  return undocumented.sort((one, other) =>
    one.place.localeCompare(other.place, "en", { numeric: true }),
  );
}

function declarationIn(folder: string, symbol: ts.Symbol): ts.Declaration | undefined {
  return symbol.declarations?.find((node) => node.getSourceFile().fileName.startsWith(folder));
}

function isDocumented(symbol: ts.Symbol, checker: ts.TypeChecker): boolean {
  return ts.displayPartsToString(symbol.getDocumentationComment(checker)).trim() !== "";
}

// npm run lint:docs [-- PACKAGE…]: lists every missing comment.
if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const wanted = process.argv.slice(2);
  const program = publicProgram(root);
  const listed = findUndocumented(root, program).filter(
    (each) => wanted.length === 0 || wanted.includes(each.package),
  );
  for (const { place, name } of listed) console.log(`${place}  ${name}`);
  console.log(`${listed.length} without a doc comment`);
  const { findings } = findDefaults(root, program);
  for (const finding of findings) console.log(finding);
  process.exitCode = listed.length + findings.length === 0 ? 0 : 1;
}
