import { existsSync, readdirSync, readFileSync } from "node:fs";
import { join, relative } from "node:path";
import ts from "typescript";

/** The published packages, type-checked. */
export interface PublicProgram {
  /** Their short names. */
  readonly packages: readonly string[];
  readonly program: ts.Program;
  readonly checker: ts.TypeChecker;
  /** What a package exports; a name that it exports again from another one is that one's symbol. */
  exportsOf(name: string): readonly ts.Symbol[];
}

/** Checks the types of the published packages: 20 s for those of this repository. */
export function publicProgram(base: string): PublicProgram {
  const packages = readdirSync(join(base, "packages")).filter(
    (name) => entriesOf(base, name).length > 0,
  );
  const { config } = ts.readConfigFile(join(base, "tsconfig.json"), ts.sys.readFile) as {
    config: object;
  };
  const files = packages.flatMap((name) => entriesOf(base, name));
  const { options } = ts.parseJsonConfigFileContent(
    { ...config, include: [], files },
    ts.sys,
    base,
  );
  const program = ts.createProgram(files, options);
  const checker = program.getTypeChecker();
  const exportsOf = (name: string) =>
    entriesOf(base, name).flatMap((entry) => {
      const file = program.getSourceFile(entry);
      const module = file === undefined ? undefined : checker.getSymbolAtLocation(file);
      if (module === undefined) throw new Error(`${relative(base, entry)} exports nothing`);
      return checker
        .getExportsOfModule(module)
        .map((each) => (each.flags & ts.SymbolFlags.Alias ? checker.getAliasedSymbol(each) : each));
    });
  return { packages, program, checker, exportsOf };
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
    const built = /^\.\/dist\/(.+)\.js$/.exec(
      typeof entry === "string" ? entry : entry.default,
    )?.[1];
    if (built === undefined) return [];
    const source = join(base, "packages", name, "src", built);
    return existsSync(`${source}.ts`) ? `${source}.ts` : join(source, "index.ts");
  });
}

/**
 * The members that the declarations of an interface, object type, class or enum name themselves;
 * not those that they inherit.
 */
export function membersOf(symbol: ts.Symbol, checker: ts.TypeChecker): ts.Symbol[] {
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
  if (ts.isUnionTypeNode(node) || ts.isIntersectionTypeNode(node))
    return node.types.flatMap(memberNodes);
  if (ts.isParenthesizedTypeNode(node)) return memberNodes(node.type);
  return [];
}

/** Where a declaration stands: `file:line`, relative to `base`. */
export function placeOf(base: string, node: ts.Node | undefined): string {
  if (node === undefined) return "";
  const file = node.getSourceFile();
  return `${relative(base, file.fileName)}:${file.getLineAndCharacterOfPosition(node.getStart()).line + 1}`;
}
