import { readFileSync } from "node:fs";
import { join } from "node:path";
import { root } from "../repository/source-files.js";
import type { Run } from "./record.js";
import { cellsOf } from "./report.js";

const RECORDED = /(^<!-- bench ([\w-]+)(?:, (.+))?: made -->\n)[\s\S]*?(^<!-- end -->$)/gm;

/** The records of benchmarks that a page shows: `docs/bench/NAME.json`. */
export const recordsOn = (text: string): readonly string[] =>
  Array.from(text.matchAll(RECORDED), ([, , name = ""]) => name);

/**
 * A page with the rows of `docs/bench/NAME.json` after each `<!-- bench NAME: made -->`, or those
 * whose names match: `<!-- bench NAME, PATTERN: made -->`.
 */
export const withRecords = (text: string): string =>
  text.replace(
    RECORDED,
    (_, begin: string, name: string, part: string | undefined, end: string) => {
      const runs = JSON.parse(
        readFileSync(join(root, `docs/bench/${name}.json`), "utf8"),
      ) as readonly Run[];
      const wanted = new RegExp(part ?? "");
      const tables = runs
        .map((run) => ({ ...run, rows: run.rows.filter(({ what }) => wanted.test(what)) }))
        .filter(({ rows }) => rows.length > 0)
        .sort((one, other) => other.rows.length - one.rows.length);
      if (tables.length === 0) throw new Error(`docs/bench/${name}.json has no row with ${part}`);
      return `${begin}\n${tables.map(recorded).join("\n")}\n${end}`;
    },
  );

/**
 * Of a run on a machine that had more to do than it has cores. The load after it is also its own.
 */
const BUSY =
  " The load was above the number of cores, so times are mostly waits for a core: ratios still compare both sides, goals in ms say little.";

const recorded = ({ date, command, machine, kernel, node, nixl, load, rows }: Run): string => {
  const loads = load === undefined ? "" : `; load ${load.before} before, ${load.after} after`;
  const isBusy = load !== undefined && load.before > 1.5 * Number.parseInt(machine, 10);
  return `${date}, \`${command}\`: \`${machine}\`, Linux ${kernel}, Node ${node}, NIXL ${nixl}${loads}.${isBusy ? BUSY : ""}

| what | ours | compared with | ratio | rounds | goal | |
| --- | --- | --- | ---: | ---: | --- | --- |
${rows.map((row) => `| ${cellsOf(row, ["met", "**missed**"]).join(" | ")} |`).join("\n")}
`;
};
