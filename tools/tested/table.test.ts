import { readdirSync, readFileSync } from "node:fs";
import { join, posix } from "node:path";
import { fileURLToPath } from "node:url";
import { expect, test } from "vitest";
import { publishedPackages, root } from "../release/packages.js";
import { SUBJECTS } from "./subjects.js";
import { PAGES, pageText } from "./table.js";

test.each(PAGES)(
  "%s has the table that the records make: node --import tsx tools/tested/record.ts",
  (page) => {
    const { found, wanted } = pageText(page);
    expect(found).toMatch(/\| (Memory of one NVIDIA GPU, without vLLM|`pull-0\.33`) \|/);
    expect(found).toBe(wanted);
  },
);

test("each record belongs to a row", () => {
  const files = readdirSync(fileURLToPath(new URL("../../docs/tested", import.meta.url)));
  const known = [...SUBJECTS.map(({ id }) => id), "vllm"];
  expect(files.filter((file) => !known.includes(file.replace(/\.json$/, "")))).toEqual([]);
});

test("the README of each package links to the table", () => {
  const folders = [...publishedPackages().values()].map(({ folder }) => folder);
  expect(folders.length).toBeGreaterThan(20);
  const without = folders.filter((folder) => {
    const link = posix.relative(folder, "docs/tested-where.md");
    return !readFileSync(join(root, folder, "README.md"), "utf8").includes(`](${link})`);
  });
  expect(without).toEqual([]);
});
