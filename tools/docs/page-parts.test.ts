import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { expect, test } from "vitest";
import type { Run } from "../bench/record.js";
import { recordsOn, withRecords } from "../bench/record-tables.js";
import { root } from "../repository/source-files.js";
import { readPages } from "../site/pages.js";
import { examplesOn, withExamples, withInstallLines } from "./page-parts.js";

// `npx vitest run tools/docs/page-parts.test.ts -u` writes what the pages have of files and
// settings.
const { pages } = readPages();

const made = (text: string) => withRecords(withInstallLines(withExamples(text)));

test.each(
  pages.filter(
    ({ text }) => text !== made(text) || [...examplesOn(text), ...recordsOn(text)].length > 0,
  ),
)(
  "$source has the examples and the records as they are, and the install lines that work now",
  ({ source, text }) => expect(made(text)).toMatchFileSnapshot(join(root, source)),
);

test("each record of a benchmark is on a page", () => {
  const shown = pages.flatMap(({ text }) => recordsOn(text));
  const records = readdirSync(join(root, "docs/bench")).filter((name) => name.endsWith(".json"));
  expect(records.length).toBeGreaterThan(3);
  expect(records.filter((name) => !shown.includes(name.replace(/\.json$/, "")))).toEqual([]);
});

test("each goal that a benchmark missed is on a page", () => {
  const folder = join(root, "docs/bench");
  const missed = readdirSync(folder)
    .filter((name) => name.endsWith(".json"))
    .flatMap((name) => JSON.parse(readFileSync(join(folder, name), "utf8")) as readonly Run[])
    .flatMap(({ rows }) => rows.filter(({ met }) => met === false));
  const text = pages.map((page) => page.text).join("\n");
  expect(missed.filter(({ what }) => !text.includes(`| ${what} |`))).toEqual([]);
});

test("each example is on a page, or a page links to it", () => {
  const shown = new Set(pages.flatMap(({ text }) => examplesOn(text)));
  const isLinked = (file: string) => pages.some(({ text }) => text.includes(`/${file})`));
  const files = readdirSync(join(root, "examples")).filter((name) => name.endsWith(".mjs"));
  const others = files.map((name) => `examples/${name}`).filter((file) => !shown.has(file));
  expect(others.filter((file) => !isLinked(file))).toEqual([]);
});

test("the install lines switch between a registry and tarballs, and back", () => {
  const text =
    "```sh\nnpm install --save-dev @kv/plan vitest@4   # note\nnpm install x\n```\n\n    npm install @kv/proxy\n";
  const packed = withInstallLines(text, false);
  expect(packed).toContain(
    "\nnpm run pack -- --save-dev @kv/plan vitest@4   # note\nnpm install x\n",
  );
  expect(packed).toContain("\n    npm run pack -- @kv/proxy\n");
  expect(withInstallLines(packed, false)).toBe(packed);
  expect(withInstallLines(packed, true)).toBe(text);
});
