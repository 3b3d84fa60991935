import { existsSync, readdirSync, readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { expect, test } from "vitest";
import { root, sourceFiles } from "./source-files.js";

/**
 * A reader finds a file by the idea of its folder, so a folder of sources holds few of them. Tests
 * and sub-folders do not count.
 */
const LIMIT = 15;

/** How many source files each `src` folder and each folder below one holds itself. */
function filesPerFolder(paths: readonly string[]): Map<string, number> {
  const counts = new Map<string, number>();
  for (const path of paths) {
    const folder = dirname(path);
    if (/(^|\/)src(\/|$)/.test(folder)) counts.set(folder, (counts.get(folder) ?? 0) + 1);
  }
  return counts;
}

/** The folders above the limit, each with its number of files. */
function crowded(paths: readonly string[]): Record<string, number> {
  return Object.fromEntries([...filesPerFolder(paths)].filter(([, count]) => count > LIMIT).sort());
}

test(`no folder of sources holds more than ${LIMIT} files`, () => {
  expect(crowded(sourceFiles(root, ["packages", "apps", "native"]))).toEqual({});
});

test("a folder with one file too many is found", () => {
  const files = Array.from({ length: LIMIT + 1 }, (_, i) => `packages/plan/src/kinds/kind-${i}.ts`);
  expect(crowded(files)).toEqual({ "packages/plan/src/kinds": LIMIT + 1 });
  expect(crowded(files.slice(1))).toEqual({});
});

test("each file that a script names exists: vitest ignores a missing one beside others", () => {
  const scripts = readdirSync(join(root, "tools"), { recursive: true, encoding: "utf8" })
    .filter((path) => path.endsWith(".mjs") && !path.includes("node_modules"))
    .map((path) => join("tools", path));
  expect(scripts.length).toBeGreaterThan(20);
  const missing = scripts.flatMap((script) => {
    const text = readFileSync(join(root, script), "utf8");
    const named = text.match(/"(?:packages|apps|tools|native)\/[\w./-]+\.(?:ts|mjs|py|sh)"/g) ?? [];
    return named
      .filter((file) => !existsSync(join(root, JSON.parse(file))))
      .map((file) => `${script}: ${file}`);
  });
  expect(missing).toEqual([]);
});

test("no test replaces a module: the files of a worker share modules", () => {
  const tests = readdirSync(join(root, "packages"), { recursive: true, encoding: "utf8" }).filter(
    (path) => /\.test\.ts$/.test(path) && !/node_modules|(^|\/)dist\//.test(path),
  );
  expect(tests.length).toBeGreaterThan(200);
  // The files of @kv/nixl that do run alone.
  const shared = tests.filter((path) => !path.startsWith("nixl/"));
  const text = (path: string) => readFileSync(join(root, "packages", path), "utf8");
  expect(shared.filter((path) => /\bvi\.(mock|doMock)\(/.test(text(path)))).toEqual([]);
});
