// A long suite: starts each program and reads all declarations.
import { execFileSync } from "node:child_process";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { builtProgram } from "@kv/testing/node-programs";
import ts from "typescript";
import { describe, expect, test } from "vitest";
import { root } from "./source-files.js";

// What users see of the programs and packages.
// `npx vitest run tools/repository/surface.long.test.ts -u` writes it again; a commit whose change
// takes something away names it in docs/migration.md.
const surface = (path: string) => join(import.meta.dirname, "surface", path);

const PROGRAMS = ["kv-epp", "kv-neuron", "kv-nixl", "kv-peer", "kv-plan", "kv-pool", "kv-proxy"];

function help(program: string, command: readonly string[]): string {
  const args = [builtProgram(program), ...command, "--help"];
  const text = execFileSync(process.execPath, args, { encoding: "utf8" });
  const commands = text.split(/^Commands:\n/m)[1] ?? "";
  const names = Array.from(commands.matchAll(/^ {2}([a-z-]+)/gm), ([, name = ""]) => name);
  const inner = names.filter((name) => name !== "help" && name !== "complete");
  return [text, ...inner.map((name) => help(program, [...command, name]))].join("\n");
}

test.each(PROGRAMS)("the help of %s and of its commands", async (program) => {
  await expect(help(program, [])).toMatchFileSnapshot(surface(`help/${program}.txt`));
});

interface Manifest {
  readonly exports?: Readonly<Record<string, string | { readonly types?: string }>>;
}

/** The declarations that each package exports, by its paths. */
const entries = readdirSync(join(root, "packages")).flatMap((name) => {
  const file = join(root, "packages", name, "package.json");
  if (name.endsWith(".md")) return [];
  const { exports = {} } = JSON.parse(readFileSync(file, "utf8")) as Manifest;
  const paths = Object.entries(exports).flatMap(([path, target]) =>
    typeof target === "object" && target.types !== undefined
      ? [{ path, file: join(root, "packages", name, target.types) }]
      : [],
  );
  return [
    {
      name,
      paths,
      others: Object.keys(exports).filter((path) => !paths.some((one) => one.path === path)),
    },
  ];
});

describe("exports", () => {
  const files = entries.flatMap(({ paths }) => paths.map(({ file }) => file));
  const program = ts.createProgram(files, {
    module: ts.ModuleKind.NodeNext,
    target: ts.ScriptTarget.ESNext,
  });
  const checker = program.getTypeChecker();
  const printer = ts.createPrinter({ removeComments: true });

  function declarationsOf(file: string): string {
    const source = program.getSourceFile(file);
    const module = source === undefined ? undefined : checker.getSymbolAtLocation(source);
    if (module === undefined) throw new Error(`${file} is no module; run npm run build`);
    const texts = checker.getExportsOfModule(module).map((symbol) => {
      const target =
        symbol.flags & ts.SymbolFlags.Alias ? checker.getAliasedSymbol(symbol) : symbol;
      const printed = (target.declarations ?? []).map((declaration) => {
        const node = ts.isVariableDeclaration(declaration)
          ? declaration.parent.parent
          : declaration;
        return printer.printNode(ts.EmitHint.Unspecified, node, node.getSourceFile());
      });
      return `// ${symbol.name}\n${printed.join("\n")}\n`;
    });
    return texts.sort().join("\n");
  }

  test.each(entries)("what @kv/$name exports", async ({ name, paths, others }) => {
    const texts = paths.map(({ path, file }) => `//// ${path}\n\n${declarationsOf(file)}`);
    const made = [...others.map((path) => `//// ${path}\n`), ...texts].join("\n");
    await expect(made).toMatchFileSnapshot(surface(`exports/${name}.d.ts.txt`));
  });
});
