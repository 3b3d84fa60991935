import { existsSync, readdirSync, readFileSync } from "node:fs";
import { join, relative } from "node:path";
import { fileURLToPath } from "node:url";
import ts from "typescript";
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
 * Finds every export of every published package, and every member of an exported interface, object type, class or enum, that has no doc
 * comment. The entries are those of `exports` in each package.json, taken from `src` in place of `dist`. A member of a class that
 * implements an interface inherits the interface's comment. A name that one package exports again from another counts where it is declared.
 */
export function findUndocumented(base: string): DocReport {
  const packages = readdirSync(join(base, "packages")).filter((name) => entriesOf(base, name).length > 0);
  const { config } = ts.readConfigFile(join(base, "tsconfig.json"), ts.sys.readFile) as { config: object };
  const files = packages.flatMap((name) => entriesOf(base, name));
  const { options } = ts.parseJsonConfigFileContent({ ...config, include: [], files }, ts.sys, base);
  const program = ts.createProgram(files, options);
  const checker = program.getTypeChecker();
  const undocumented: Undocumented[] = [];
  const total = { exports: 0, members: 0 };

  for (const name of packages) {
    const folder = `${join(base, "packages", name)}/`;
    const seen = new Set<ts.Symbol>();
    /** Several symbols are the branches of a union that have a member of one name: one comment is enough for them. */
    const look = (symbols: readonly ts.Symbol[], path: string, kind: "exports" | "members"): void => {
      const own = symbols.filter(
        (symbol) => !seen.has(symbol) && declarationIn(folder, symbol) !== undefined,
      );
      const [first] = own;
      if (first === undefined) return;
      for (const symbol of own) seen.add(symbol);
      total[kind] += 1;
      if (!own.some((symbol) => isDocumented(symbol, checker)))
        undocumented.push({ package: name, place: placeOf(base, declarationIn(folder, first)), name: path });
      const members = own.flatMap((symbol) => membersOf(symbol, checker));
      for (const member of new Set(members.map((each) => each.name))) {
        const branches = members.filter((each) => each.name === member);
        look(branches, `${path}.${member}`, "members");
      }
    };
    for (const entry of entriesOf(base, name)) {
      const file = program.getSourceFile(entry);
      const module = file === undefined ? undefined : checker.getSymbolAtLocation(file);
      if (module === undefined) throw new Error(`${relative(base, entry)} exports nothing`);
      for (const each of checker.getExportsOfModule(module))
        look(
          [each.flags & ts.SymbolFlags.Alias ? checker.getAliasedSymbol(each) : each],
          each.name,
          "exports",
        );
    }
  }
  undocumented.sort((one, other) => one.place.localeCompare(other.place, "en", { numeric: true }));
  return { undocumented, total };
}

/** The source files behind `exports` of a published package; none for a private one. */
function entriesOf(base: string, name: string): string[] {
  const manifest = join(base, "packages", name, "package.json");
  if (!existsSync(manifest)) return [];
  const { private: isPrivate, exports = {} } = JSON.parse(readFileSync(manifest, "utf8")) as {
    private?: boolean;
    exports?: Record<string, string | { default: string }>;
  };
  if (isPrivate === true) return [];
  return Object.values(exports).flatMap((entry) => {
    const built = /^\.\/dist\/(.+)\.js$/.exec(typeof entry === "string" ? entry : entry.default)?.[1];
    if (built === undefined) return [];
    const source = join(base, "packages", name, "src", built);
    return existsSync(`${source}.ts`) ? `${source}.ts` : join(source, "index.ts");
  });
}

/** The members that the declarations of an interface, object type, class or enum name themselves; not those that they inherit. */
function membersOf(symbol: ts.Symbol, checker: ts.TypeChecker): ts.Symbol[] {
  return (symbol.declarations ?? []).flatMap(memberNodes).flatMap((node) => {
    if (node.name === undefined || ts.isPrivateIdentifier(node.name)) return [];
    if (
      ts.canHaveModifiers(node) &&
      node.modifiers?.some(({ kind }) => kind === ts.SyntaxKind.PrivateKeyword)
    )
      return [];
    return checker.getSymbolAtLocation(node.name) ?? [];
  });
}

function memberNodes(node: ts.Node): readonly (ts.TypeElement | ts.ClassElement | ts.EnumMember)[] {
  if (ts.isInterfaceDeclaration(node) || ts.isClassDeclaration(node) || ts.isEnumDeclaration(node))
    return [...node.members];
  if (ts.isTypeAliasDeclaration(node)) return memberNodes(node.type);
  if (ts.isTypeLiteralNode(node)) return [...node.members];
  if (ts.isUnionTypeNode(node) || ts.isIntersectionTypeNode(node)) return node.types.flatMap(memberNodes);
  if (ts.isParenthesizedTypeNode(node)) return memberNodes(node.type);
  return [];
}

function declarationIn(folder: string, symbol: ts.Symbol): ts.Declaration | undefined {
  return symbol.declarations?.find((node) => node.getSourceFile().fileName.startsWith(folder));
}

function isDocumented(symbol: ts.Symbol, checker: ts.TypeChecker): boolean {
  return ts.displayPartsToString(symbol.getDocumentationComment(checker)).trim() !== "";
}

function placeOf(base: string, node: ts.Node | undefined): string {
  if (node === undefined) return "";
  const file = node.getSourceFile();
  return `${relative(base, file.fileName)}:${file.getLineAndCharacterOfPosition(node.getStart()).line + 1}`;
}

// npm run lint:docs [-- PACKAGE…]: lists every missing comment.
if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const wanted = process.argv.slice(2);
  const { undocumented } = findUndocumented(root);
  const listed = undocumented.filter((each) => wanted.length === 0 || wanted.includes(each.package));
  for (const { place, name } of listed) console.log(`${place}  ${name}`);
  console.log(`${listed.length} without a doc comment`);
  process.exitCode = listed.length === 0 ? 0 : 1;
}
