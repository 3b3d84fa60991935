import { readFileSync } from "node:fs";
import { join } from "node:path";
import ts from "typescript";
import { expect, test } from "vitest";
import { root, sourceFiles } from "./source-files.js";

/** What reads the time of the machine. */
const SYSTEM_TIME =
  /^(systemClock|Date\.now|performance\.now|process\.hrtime(\.bigint)?)\(|^new Date\(\)/;

/**
 * Uses of the machine's time that no caller can replace: those that run when the module is loaded,
 * and defaults of parameters.
 */
function fixedClocks(path: string, text: string): string[] {
  const found: string[] = [];
  const file = ts.createSourceFile(path, text, ts.ScriptTarget.Latest, true);
  const visit = (node: ts.Node, runsAtLoad: boolean) => {
    if (SYSTEM_TIME.test(node.getText(file)) && (runsAtLoad || isDefaultOfParameter(node)))
      found.push(`${path}:${file.getLineAndCharacterOfPosition(node.getStart(file)).line + 1}`);
    else {
      const runsLater =
        ts.isFunctionLike(node) ||
        (ts.isPropertyDeclaration(node) &&
          (ts.getCombinedModifierFlags(node) & ts.ModifierFlags.Static) === 0);
      ts.forEachChild(node, (child) => visit(child, runsAtLoad && !runsLater));
    }
  };
  visit(file, true);
  return found;
}

const isDefaultOfParameter = (node: ts.Node): boolean =>
  ts.isParameter(node.parent) && node.parent.initializer === node;

test.each([
  ["const started = Date.now();", 1],
  ["class Queue { static readonly clock = systemClock(); }", 1],
  ["class Queue { constructor(clock: Clock = systemClock()) {} }", 1],
  ["export const now = () => performance.now();", 0],
  ["function create(options: Options) { return options.clock ?? systemClock(); }", 0],
])("%s has %i fixed clocks", (text, count) => {
  expect(fixedClocks("example.ts", text)).toHaveLength(count);
});

test("the clock comes from the program: no module reads the time when it is loaded", () => {
  const files = sourceFiles(root, ["packages", "apps"]).filter((path) => /\/src\//.test(path));
  expect(files.length).toBeGreaterThan(500);
  expect(
    files.flatMap((path) => fixedClocks(path, readFileSync(join(root, path), "utf8"))),
  ).toEqual([]);
});
