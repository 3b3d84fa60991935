import { existsSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { root } from "../repository/source-files.js";
import type { Run } from "./record.js";
import type { Row } from "./report.js";

const RECORDED = /(^<!-- bench ([\w-]+)(?:, (.+))?: made -->\n)[\s\S]*?(^<!-- end -->$)/gm;

/** The records of benchmarks that a page shows: `docs/bench/NAME.json`. */
export const recordsOn = (text: string): readonly string[] =>
  Array.from(text.matchAll(RECORDED), ([, , name = ""]) => name);

/**
 * The rows of `docs/bench/NAME.json` follow each `<!-- bench NAME: made -->`, or those whose names
 * match: `<!-- bench NAME, PATTERN: made -->`.
 */
export const withRecords = (text: string): string =>
  text.replace(
    RECORDED,
    (_, begin: string, name: string, part: string | undefined, end: string) => {
      const file = join(root, `docs/bench/${name}.json`);
      if (!existsSync(file)) return `${begin}\nNot yet measured on a quiet machine.\n\n${end}`;
      const runs = JSON.parse(readFileSync(file, "utf8")) as readonly Run[];
      const wanted = new RegExp(part ?? "");
      const tables = runs
        .map((run) => ({ ...run, rows: run.rows.filter(({ what }) => wanted.test(what)) }))
        .filter(({ rows }) => rows.length > 0)
        .sort((one, other) => other.rows.length - one.rows.length);
      if (tables.length === 0) throw new Error(`docs/bench/${name}.json has no row with ${part}`);
      return `${begin}\n${tables.map(recorded).join("\n")}\n${end}`;
    },
  );

/** The load after a run is also its own. */
const BUSY =
  " More load than cores: the ratios compare both sides, the times are mostly waits for a core.";

const COLUMNS = ["what", "ours", "compared with", "ratio", "goal"] as const;

/** Columns without a value are left out. */
const tableOf = (rows: readonly Row[]): string => {
  const cells = rows.map(({ what, ours, theirs, ratio, wanted, met }) => [
    what,
    ours,
    theirs,
    `${ratio ?? ""}`,
    met === undefined ? "" : `${wanted}: ${met ? "met" : "**missed**"}`,
  ]);
  const used = COLUMNS.flatMap((_, at) =>
    cells.some((row) => !["", "-"].includes(row[at] ?? "")) ? [at] : [],
  );
  const line = (row: readonly string[]) => `| ${used.map((at) => row[at]).join(" | ")} |\n`;
  const rules = COLUMNS.map((name) => (name === "ratio" ? "---:" : "---"));
  return [COLUMNS, rules, ...cells].map(line).join("");
};

const COMPARED = /^(\S+) \/ (\S+): (.+)$/;

/** A row for each figure and a column for each router, where rows are `ROUTER / REFERENCE: FIGURE`. */
const besideReference = (rows: readonly Row[]): string => {
  const compared = rows.flatMap((row) => {
    const [, router = "", reference = "", figure = ""] = COMPARED.exec(row.what) ?? [];
    return router === "" ? [] : [{ row, router, reference, figure }];
  });
  const [first] = compared;
  if (first === undefined) return "";
  const routers = [...new Set(compared.map(({ router }) => router))];
  const figures = [...new Set(compared.map(({ figure }) => figure))];
  const lines = figures.map((name) => {
    const all = compared.filter(({ figure }) => figure === name);
    const cellOfRouter = (of: string) => cellOf(all.find(({ router }) => router === of)?.row);
    return [name, all[0]?.row.theirs ?? "", ...routers.map(cellOfRouter)];
  });
  const head = ["", first.reference, ...routers];
  return [head, head.map(() => "---"), ...lines]
    .map((line) => `| ${line.join(" | ")} |\n`)
    .join("");
};

/** The ratio with the least and the largest value. */
const cellOf = (row: Row | undefined): string => {
  if (row === undefined) return "";
  const [least = "", , most = ""] = row.ours.split(" / ");
  const [largest = ""] = most.split(" ");
  const range = least === largest ? least : `${least}–${largest}`;
  const cell = row.ratio === undefined ? range : `${row.ratio} (${range})`;
  return row.met === false ? `${cell}, **goal ${row.wanted}**` : cell;
};

const recorded = ({ date, command, machine, kernel, node, nixl, load, rows }: Run): string => {
  const loads = load === undefined ? "" : `; load ${load.before} before, ${load.after} after`;
  const rounds = new Set(rows.flatMap((row) => row.rounds ?? []));
  const counts = rounds.size === 0 ? "" : `; rounds: ${[...rounds].join(", ")}`;
  const isBusy = load !== undefined && load.before > 1.5 * Number.parseInt(machine, 10);
  return `${date}, \`${command}\`: \`${machine}\`, Linux ${kernel}, Node ${node}, NIXL ${nixl}${loads}${counts}.${isBusy ? BUSY : ""}

${[besideReference(rows), tableOf(rows.filter(({ what }) => !COMPARED.test(what)))].filter(Boolean).join("\n")}`;
};
