import { existsSync, readFileSync, writeFileSync } from "node:fs";
import { root } from "../repository/source-files.js";
import { SUBJECTS } from "./subjects.js";

/** What was run where, and passed. `record.ts` writes it. */
export interface TestedRecord {
  /** The day, as `2026-11-27`. */
  readonly date: string;
  /** What was run. */
  readonly command: string;
  /** Processor and C library of the machine. */
  readonly machine: string;
}

/** The record of a subject; undefined where nothing was ever run on it. */
export function recordOf(id: string): TestedRecord | undefined {
  const file = `${root}docs/tested/${id}.json`;
  return existsSync(file) ? (JSON.parse(readFileSync(file, "utf8")) as TestedRecord) : undefined;
}

/** The table "tested where", in Markdown. */
function testedTable(): string {
  const rows = SUBJECTS.map(({ id, title, without, page: other }) => {
    if (other !== undefined) return `| ${title} | [${other[0]}](${other[1]}) | |`;
    const record = recordOf(id);
    if (record === undefined)
      return `| ${title} | **never**${without === "" ? "" : `: ${without}`} | |`;
    return `| ${title} | ${record.date}, \`${record.command}\` | ${record.machine} |`;
  });
  return ["| what | run | on |", "| --- | --- | --- |", ...rows].join("\n");
}

/**
 * The table of the live runs against vLLM, in Markdown. `npm run test:vllm -- --record` writes
 * their records.
 */
function liveTable(): string {
  const text = readFileSync(`${root}docs/tested/vllm.json`, "utf8");
  const parts = JSON.parse(text) as Record<
    string,
    { date: string; passed: number; leftOut: number }
  >;
  const rows = Object.entries(parts).map(
    ([part, { date, passed, leftOut }]) => `| \`${part}\` | ${date} | ${passed} | ${leftOut} |`,
  );
  const head = [
    "| part | last whole run | tests that passed | left out |",
    "| --- | --- | --- | --- |",
  ];
  return [...head, ...rows.sort()].join("\n");
}

/** The pages that have a table, between two comments. */
export const PAGES = ["docs/tested-where.md", "docs/vllm-versions.md"] as const;
const BLOCK = /(<!-- tested where: made by tools\/tested -->\n)[\s\S]*?(\n?<!-- end -->)/;

/** The text of a page, and what it must be by the records. */
export function pageText(page: string): { found: string; wanted: string } {
  const found = readFileSync(root + page, "utf8");
  const table = page === "docs/vllm-versions.md" ? liveTable() : testedTable();
  return {
    found,
    wanted: found.replace(
      BLOCK,
      (_, begin: string, end: string) => `${begin}${table}\n${end.trimStart()}`,
    ),
  };
}

/** Writes the table into the pages. */
export function writePages(): void {
  for (const page of PAGES) writeFileSync(root + page, pageText(page).wanted);
}
