import { readdirSync, readFileSync, statSync } from "node:fs";
import { dirname, join, relative, resolve } from "node:path";
import { expect, test } from "vitest";
import { BY_INPUTS } from "../../scripts/suites.mjs";
import { root, sourceFiles } from "./source-files.js";

const IMPORT = /(?:from|import\(|new URL\()\s*"(@kv\/[a-z-]+|\.\.?\/[^"]*\.\w+")/g;

/** The files and packages of this repository that the files below `suite` name. */
function named(suite: string): string[] {
  const paths = statSync(join(root, suite)).isFile()
    ? [suite]
    : readdirSync(join(root, suite), { recursive: true, encoding: "utf8" }).map((path) => `${suite}/${path}`);
  return paths
    .filter((path) => path.endsWith(".ts"))
    .flatMap((path) =>
      Array.from(readFileSync(join(root, path), "utf8").matchAll(IMPORT), ([, name = ""]) =>
        name.startsWith("@kv/")
          ? `packages/${name.slice(4)}/src/index.ts`
          : relative(root, resolve(root, dirname(path), name.slice(0, -1))),
      ),
    );
}

test.each(BY_INPUTS)(
  "what the tests of '$name' import is among the inputs that decide whether they run",
  ({ suites, inputs }) => {
    const found = [...new Set(suites.flatMap(named))];
    expect(found.length).toBeGreaterThan(0);
    // A suite's own folder is not an input of "release", whose files are listed; what it imports from elsewhere is.
    const outside = found.filter((path) => !suites.some((suite) => path.startsWith(dirname(suite))));
    expect(outside.filter((path) => !inputs.some((input) => input.test(path)))).toEqual([]);
  },
);

test("what tests share registers no hook at its top: a worker loads it once, for the first file that imports it", () => {
  const shared = sourceFiles(root, ["packages", "apps", "tools"]).filter(
    (path) => !path.endsWith(".live.ts"),
  );
  expect(shared.length).toBeGreaterThan(1000);
  const hook = /^(after|before)(Each|All)\(/m;
  expect(shared.filter((path) => hook.test(readFileSync(join(root, path), "utf8")))).toEqual([]);
});
