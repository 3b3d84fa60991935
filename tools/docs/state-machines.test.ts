import { readdirSync, readFileSync } from "node:fs";
import { join, posix } from "node:path";
import { expect, test } from "vitest";
import { root } from "../repository/source-files.js";

/**
 * Checks docs/design/state-machines.md against the traces and the code. tools/site checks that each
 * link leads somewhere.
 */
const PAGE = "docs/design/state-machines.md";
const page = readFileSync(join(root, PAGE), "utf8");
const rows = page.split("\n").filter((line) => line.startsWith("| "));

const tracesIn = (text: string) =>
  Array.from(text.matchAll(/\]\(([^)]+\.txt)\)/g), ([, path = ""]) =>
    posix.normalize(posix.join(posix.dirname(PAGE), path)),
  );

test("each trace shows a row", () => {
  const traces = ["pull", "push"].flatMap((name) => {
    const folder = `packages/${name}/test/traces`;
    return readdirSync(join(root, folder)).map((file) => `${folder}/${file}`);
  });
  const shown = new Set(tracesIn(page));
  expect(traces.filter((trace) => !shown.has(trace))).toEqual([]);
});

test("each row has a trace, and the code and the type of its failure are in one", () => {
  const checked = rows.filter(
    (row) => / traces \|$|^\| -|^\| `(ms|who|what|P holds)`|^\| column/.exec(row) === null,
  );
  for (const row of checked) {
    const texts = tracesIn(row).map((trace) => readFileSync(join(root, trace), "utf8"));
    expect(texts, row).not.toEqual([]);
    for (const [, word = ""] of row.matchAll(
      /`(KV_[A-Z_]+|[a-z]+_(?:[a-z]+_)*(?:failed|expired|refused|mismatch|out))`/g,
    ))
      expect(
        texts.some((text) => text.includes(word)),
        `${word}: ${row}`,
      ).toBe(true);
  }
});

test("D's scheduler has the states of the code", () => {
  const code = readFileSync(
    join(root, "packages/connector/src/scheduler/decode-requests.ts"),
    "utf8",
  );
  const states = Array.from(
    (/^type Phase = (.+);$/m.exec(code)?.[1] ?? "").matchAll(/"([a-z-]+)"/g),
    ([, state]) => state,
  );
  const section = page.slice(page.indexOf("## D's scheduler"), page.indexOf("## D's worker: pull"));
  const named = Array.from(section.matchAll(/^\| `([a-z-]+)` \|/gm), ([, state]) => state);
  expect([...new Set(named)].sort()).toEqual(states.sort());
});
