// Pages name the tests that show what they say. npm test checks each of them with its own report.
import { existsSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { root } from "../setup/setup.mjs";

/** Everything runs, in its long form. */
export const isLongRun = process.env.KV_LONG === "1" || process.env.CI === "true";

/** Pages that name tests in the form `FILE` "part of the name". */
export const PAGES = ["docs/parity.md", "docs/field-reports.md", "docs/operate/host-process.md"];

/** The tests that a row, or a whole page, names. */
export function namedTests(text) {
  return Array.from(text.matchAll(/`([^`]+\.ts)` "([^"]+)"/g), ([, file, name]) => ({
    file,
    name,
  }));
}

/** Whether a page names a test that is not in the file. */
export function namesNothing({ file, name }) {
  return !existsSync(join(root, file)) || !readFileSync(join(root, file), "utf8").includes(name);
}

/**
 * Those of the named tests that a report of vitest (`--reporter=json`) does not have, or has as
 * failed. A file that holds no tests of its own, but what others run, is looked for in all of them.
 * Files that npm test leaves out are checked in CI, where a test must also have passed.
 */
export function notShown(named, { testResults }, whole = isLongRun) {
  const tests = new Map(
    testResults.map((file) => [file.name.slice(root.length), file.assertionResults]),
  );
  const all = testResults.flatMap((file) => file.assertionResults);
  return named.filter(({ file, name }) => {
    const isShared = !file.endsWith(".test.ts");
    if (!whole && !tests.has(file) && !isShared) return !existsSync(join(root, file));
    const found = (isShared ? all : (tests.get(file) ?? [])).filter(({ fullName }) =>
      fullName.includes(name),
    );
    if (!whole && isShared && found.length === 0) return !existsSync(join(root, file));
    const isShown = whole ? found.some(({ status }) => status === "passed") : found.length > 0;
    return !isShown || found.some(({ status }) => status === "failed");
  });
}

/** Throws with the tests of `PAGES` that a report of vitest does not show. */
export function checkPages(report) {
  const wrong = PAGES.flatMap((page) =>
    notShown(namedTests(readFileSync(join(root, page), "utf8")), report).map(
      ({ file, name }) => `${page}: ${file} "${name}"`,
    ),
  );
  if (wrong.length > 0) throw new Error(wrong.join("\n"));
}
