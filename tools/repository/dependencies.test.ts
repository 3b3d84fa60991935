import { execFile } from "node:child_process";
import { mkdirSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join, relative, sep } from "node:path";
import { promisify } from "node:util";
import { isLongRun } from "@kv/testing/long-run";
import { scratchFolder } from "@kv/testing/scratch-folder";
import ts from "typescript";
import { beforeEach, describe, expect, onTestFinished, test } from "vitest";
import mayImport from "./may-import.json" with { type: "json" };
import { root, sourceFiles } from "./source-files.js";

/**
 * Checks the dependencies between packages. dependency-cruiser checks imports
 * (tools/repository/dependency-cruiser.cjs). The scan here also finds a specifier that is a
 * constant, as in `const name = "@kv/connector"; await import(name)`. Both read may-import.json.
 * Tests may import every package.
 */
const run = promisify(execFile);
const ALLOWED: Readonly<Record<string, readonly string[]>> = Object.assign(
  {},
  ...Object.values(mayImport),
);

/**
 * String literals in the sources of packages that name a package which must not be imported there.
 */
function violations(folder: string): string[] {
  return sourceFiles(folder, ["packages"])
    .filter((path) => /\/src\//.test(path))
    .flatMap((path) => {
      const importer = path.split("/")[1] ?? "";
      const names = packagesNamedIn(readFileSync(join(folder, path), "utf8"));
      return names
        .filter((name) => name !== importer && !isAllowed(importer, name))
        .map((name) => `${path} imports @kv/${name}`);
    });
}

function isAllowed(importer: string, name: string): boolean {
  // The addon's platform packages are not in the table.
  if (name !== "testing" && !(name in ALLOWED)) return true;
  return ALLOWED[importer]?.includes(name) ?? false;
}

/**
 * The packages in string literals that are an import specifier, such as `@kv/plan` or
 * `@kv/conformance/transport`.
 */
function packagesNamedIn(text: string): string[] {
  if (!text.includes("@kv/")) return [];
  const names = new Set<string>();
  const visit = (node: ts.Node): void => {
    const name = ts.isStringLiteralLike(node)
      ? /^@kv\/([a-z0-9-]+)(\/[\w./-]*)?$/.exec(node.text)?.[1]
      : undefined;
    if (name !== undefined) names.add(name);
    ts.forEachChild(node, visit);
  };
  visit(ts.createSourceFile("source.ts", text, ts.ScriptTarget.ES2022));
  return [...names];
}

test("sources import only the packages that may-import.json allows", () => {
  expect(violations(root)).toEqual([]);
});

test("every package has a row in may-import.json", () => {
  const packages = readdirSync(join(root, "packages")).filter((name) => name !== "README.md");
  expect(packages.filter((name) => !(name in ALLOWED))).toEqual([]);
});

describe.runIf(isLongRun)("in a small source tree", () => {
  let folder = "";
  beforeEach(() => {
    folder = scratchFolder(onTestFinished);
    const paths = {
      "@kv/testing/*": ["./tools/testing/src/*.ts"],
      "@kv/*": ["./packages/*/src/index.ts"],
    };
    write("tsconfig.json", JSON.stringify({ compilerOptions: { paths } }));
    for (const name of ["connector", "plan", "proxy", "pull"])
      write(`packages/${name}/src/index.ts`, "export const x = 1;");
    write("tools/testing/src/engine.ts", "export const x = 1;");
  });

  function write(path: string, text: string): void {
    mkdirSync(dirname(join(folder, path)), { recursive: true });
    writeFileSync(join(folder, path), `${text}\n`);
  }

  /** The rules of dependency-cruiser that the tree breaks. */
  async function broken(): Promise<string[]> {
    const config = relative(folder, join(root, "tools/repository/dependency-cruiser.cjs"))
      .split(sep)
      .join("/");
    const args = ["--config", config, "--output-type", "json", "packages", "tools"];
    const { stdout } = await run(join(root, "node_modules/.bin/depcruise"), args, {
      cwd: folder,
    }).catch((error: { stdout: string }) => error);
    const { summary } = JSON.parse(stdout) as {
      summary: { violations: { from: string; rule: { name: string } }[] };
    };
    return summary.violations.map(({ from, rule }) => `${from}: ${rule.name}`).sort();
  }

  const late = "packages/plan/src/late.ts";
  const lateIsFound = [`${late} imports @kv/connector`];
  test.each<[string, Readonly<Record<string, string>>, readonly string[], readonly string[]]>([
    [
      "both checks find a dynamic import that is not allowed",
      { [late]: 'export const load = () => import("@kv/connector");' },
      [`${late}: plan-imports-only-interface-topology`],
      lateIsFound,
    ],
    [
      "the scan finds a dynamic import of a constant",
      { [late]: 'const name = "@kv/connector";\nexport const load = () => import(name);' },
      [],
      lateIsFound,
    ],
    [
      "only tests may import tools",
      { "packages/pull/src/double.ts": 'export { x } from "@kv/testing/engine";' },
      ["packages/pull/src/double.ts: only-tests-import-tools"],
      ["packages/pull/src/double.ts imports @kv/testing"],
    ],
    [
      "two files that import only types of each other are a circle",
      {
        "packages/plan/src/egg.ts":
          'import type { Hen } from "./hen.js";\nexport type Egg = Hen[];',
        "packages/plan/src/hen.ts":
          'import type { Egg } from "./egg.js";\nexport type Hen = Egg[];',
      },
      ["packages/plan/src/egg.ts: no-cycles"],
      [],
    ],
    [
      "tests may import every package of their tier or below",
      {
        "packages/plan/src/late.test.ts": 'import "@kv/testing/engine";\nimport "@kv/connector";',
        "packages/plan/test/pair.ts": 'import "@kv/pull";',
        "packages/proxy/test/pair.ts": 'import "@kv/pull";',
      },
      [],
      [],
    ],
    [
      "tests of the core import nothing above it, and neither does what they need of tools/",
      {
        "tools/testing/src/front.ts": 'export { x } from "@kv/proxy";',
        "packages/plan/src/late.test.ts": 'import "@kv/testing/front";',
        "packages/plan/test/front.ts": 'import "@kv/proxy";',
        "tools/bench/report.ts": "export const x = 1;",
        "tools/testing/src/table.ts": 'export { x } from "../../bench/report.js";',
      },
      [
        "packages/plan/test/front.ts",
        "tools/testing/src/front.ts",
        "tools/testing/src/table.ts",
      ].map((file) => `${file}: core-and-what-its-tests-need-import-core-alone`),
      [],
    ],
  ])("%s", async (_, files, rules, found) => {
    for (const [path, text] of Object.entries(files)) write(path, text);
    expect(await broken()).toEqual(rules);
    expect(violations(folder)).toEqual(found);
  });
});

test("a tier's packages import their own tier and those below", () => {
  const below: string[] = [];
  for (const rows of Object.values(mayImport)) {
    below.push(...Object.keys(rows));
    for (const [name, allowed] of Object.entries(rows))
      expect(
        allowed.filter((other) => !below.includes(other)),
        name,
      ).toEqual([]);
  }
});
