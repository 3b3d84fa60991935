import { readdirSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { expect, test } from "vitest";
import { SUBJECTS } from "./subjects.js";
import { PAGES, pageText } from "./table.js";

test.each(PAGES)(
  "%s has the table that the records make: node --import tsx tools/tested/record.ts",
  (page) => {
    const { found, wanted } = pageText(page);
    expect(found).toContain("| NVIDIA GPU |");
    expect(found).toBe(wanted);
  },
);

test("each record belongs to a row", () => {
  const files = readdirSync(fileURLToPath(new URL("../../docs/tested", import.meta.url)));
  expect(files.filter((file) => !SUBJECTS.some(({ id }) => file === `${id}.json`))).toEqual([]);
});
