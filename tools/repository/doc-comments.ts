import { join } from "node:path";
import { fileURLToPath } from "node:url";
import ts from "typescript";
import { findDefaults } from "./option-defaults.js";
import { membersOf, placeOf, publicProgram } from "./public-program.js";
import { root } from "./source-files.js";

/** A public name without a doc comment. */
export interface Undocumented {
  /** The short name of its package, such as `plan`. */
  readonly package: string;
  /** `file:line`, relative to the root. */
  readonly place: string;
  /** The export, or `export.member`. */
  readonly name: string;
}

/** How much of the packages' public surface has a doc comment. */
export interface DocReport {
  readonly undocumented: readonly Undocumented[];
  /** All exports and members that were looked at, documented or not. */
  readonly total: { readonly exports: number; readonly members: number };
}

/**
 * Finds every export of every published package, and every member of an exported interface, object
 * type, class or enum, that has no doc comment. The entries are those of `exports` in each
 * package.json, taken from `src` in place of `dist`. A member of a class that implements an
 * interface inherits the interface's comment. A name that one package exports again from another
 * counts where it is declared.
 */
export function findUndocumented(
  base: string,
  { packages, checker, exportsOf } = publicProgram(base),
): DocReport {
  const undocumented: Undocumented[] = [];
  const total = { exports: 0, members: 0 };

  for (const name of packages) {
    const folder = `${join(base, "packages", name)}/`;
    const seen = new Set<ts.Symbol>();
    /**
     * Several symbols are the branches of a union that have a member of one name: one comment is
     * enough for them.
     */
    const look = (
      symbols: readonly ts.Symbol[],
      path: string,
      kind: "exports" | "members",
    ): void => {
      const own = symbols.filter(
        (symbol) => !seen.has(symbol) && declarationIn(folder, symbol) !== undefined,
      );
      const [first] = own;
      if (first === undefined) return;
      for (const symbol of own) seen.add(symbol);
      total[kind] += 1;
      if (!own.some((symbol) => isDocumented(symbol, checker)))
        undocumented.push({
          package: name,
          place: placeOf(base, declarationIn(folder, first)),
          name: path,
        });
      const members = own.flatMap((symbol) => membersOf(symbol, checker));
      for (const member of new Set(members.map((each) => each.name))) {
        const branches = members.filter((each) => each.name === member);
        look(branches, `${path}.${member}`, "members");
      }
    };
    for (const each of exportsOf(name)) look([each], each.name, "exports");
  }
  undocumented.sort((one, other) => one.place.localeCompare(other.place, "en", { numeric: true }));
  return { undocumented, total };
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
  const { undocumented } = findUndocumented(root, program);
  const listed = undocumented.filter(
    (each) => wanted.length === 0 || wanted.includes(each.package),
  );
  for (const { place, name } of listed) console.log(`${place}  ${name}`);
  console.log(`${listed.length} without a doc comment`);
  const { findings } = findDefaults(root, program);
  for (const finding of findings) console.log(finding);
  process.exitCode = listed.length + findings.length === 0 ? 0 : 1;
}
