// A long suite: runs a request on each way, with coverage.
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { describe, expect, test } from "vitest";
import { ExecutedFiles } from "./executed-files.js";
import { LEFT_OUT, type PathTable, REQUEST_PATHS } from "./request-paths.js";
import { root } from "./source-files.js";

/**
 * Compares the tables of docs/architecture.md with the files of which functions run for one warm
 * request. `UPDATE=1 npx vitest run tools/repository/request-path.long.test.ts` adds and removes
 * rows; the sentence of a new row is written by hand.
 */
const PAGE = join(root, "docs/architecture.md");
const MISSING = "…";

/** The rows of a table: the file of each, and the whole line. */
function rowsOf(page: string, heading: string): Map<string, string> {
  const section = page.split(`\n### ${heading}\n`)[1]?.split(/\n##/)[0] ?? "";
  return new Map(
    Array.from(section.matchAll(/^\| `([^`]+\.ts)` \|.*$/gm), ([line, file = ""]) => [file, line]),
  );
}

/** The page with other rows in a table. */
function withRows(page: string, heading: string, rows: readonly string[]): string {
  const [before = "", after = ""] = page.split(`\n### ${heading}\n`);
  const section = after.split(/\n##/)[0] ?? "";
  const table = /(^\|.*\n)+/m.exec(section)?.[0] ?? "";
  const head = table.split("\n").slice(0, 2);
  return `${before}\n### ${heading}\n${after.replace(table, `${[...head, ...rows].join("\n")}\n`)}`;
}

/** The files that must have a row. */
function required(files: Iterable<string>, { otherHalf }: PathTable): string[] {
  return [...files].filter((file) => !LEFT_OUT.test(file) && otherHalf?.test(file) !== true).sort();
}

describe.each(REQUEST_PATHS)("one warm request", ({ modules, tables, start, missing }) => {
  const skipped = missing === undefined ? "" : ` (${missing})`;
  const headings = tables.map(({ heading }) => heading).join(", ");
  test.skipIf(missing)(`${headings}: the tables name the files that run${skipped}`, async () => {
    const executed = await ExecutedFiles.open();
    const loaded: Record<string, unknown> = {};
    for (const [name, file] of Object.entries(modules))
      loaded[name] = await executed.load(name, file);
    const request = await start(loaded);
    const ran = await executed.during(() => request.run());
    await request.close();
    await executed.close();
    for (const table of tables) {
      const { heading, after, most } = table;
      const files = ran.get(table.module) ?? new Set<string>();
      const needed = required(files, table);
      console.info(`${heading}: ${files.size} files run, ${needed.length} of them are on the way`);
      const page = readFileSync(PAGE, "utf8");
      const rows = rowsOf(page, heading);
      const above = after === undefined ? new Map<string, string>() : rowsOf(page, after);
      const unlisted = needed.filter((file) => !rows.has(file) && !above.has(file));
      if (process.env["UPDATE"] !== undefined) {
        const kept = [...rows].filter(([file]) => files.has(file)).map(([, line]) => line);
        const added = unlisted.map((file) => `| \`${file}\` | ${MISSING} |`);
        writeFileSync(PAGE, withRows(page, heading, [...kept, ...added]));
        continue;
      }
      expect(unlisted, `${heading}: files that run and have no row`).toEqual([]);
      expect(
        [...above.keys(), ...rows.keys()].filter((file) => !files.has(file)),
        `${heading}: rows that do not run`,
      ).toEqual([]);
      expect([...rows.values()].filter((line) => line.includes(`| ${MISSING} |`))).toEqual([]);
      expect(needed.length, `${heading}: more files than before`).toBeLessThanOrEqual(most);
    }
  });
});
