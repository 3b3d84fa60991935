import { readFileSync } from "node:fs";
import { join } from "node:path";
import type { Run } from "../../bench/record.js";
import type { Row } from "../../bench/report.js";
import { root } from "../repository/source-files.js";

/** Whether the packages are on a registry. Until then the pages install tarballs that a checkout packs. `npx vitest run tools/docs/page-parts.test.ts -u` writes the pages. */
export const ON_A_REGISTRY = false;

const IN_A_CHECKOUT = "# in a checkout; prints the line that installs them in your project";
const INSTALL = /^(?: *# in a checkout; .*\n)?( *)(?:npm install|npm run pack --) ((?=.*@kv\/).*)$/gm;

/** A page with its lines that install packages of this repository: from a registry, or from tarballs of a checkout. */
export function withInstallLines(text: string, onRegistry: boolean = ON_A_REGISTRY): string {
  return text.replace(INSTALL, (_, indent: string, packages: string) =>
    onRegistry
      ? `${indent}npm install ${packages}`
      : `${indent}${IN_A_CHECKOUT}\n${indent}npm run pack -- ${packages}`,
  );
}

const EXAMPLE = /(^<!-- example: (examples\/[\w.-]+) -->\n+```\w+\n)[\s\S]*?(^```$)/gm;

/** The files of `examples/` that a page shows. */
export const examplesOn = (text: string): readonly string[] =>
  Array.from(text.matchAll(EXAMPLE), ([, , file = ""]) => file);

/** A page with the text of each example that it shows. */
export const withExamples = (text: string): string =>
  text.replace(
    EXAMPLE,
    (_, begin: string, file: string, end: string) => begin + readFileSync(join(root, file), "utf8") + end,
  );

const RECORDED = /(^<!-- bench ([\w-]+)(?:, (.+))?: made -->\n)[\s\S]*?(^<!-- end -->$)/gm;

/** The records of benchmarks that a page shows: `docs/bench/NAME.json`. */
export const recordsOn = (text: string): readonly string[] =>
  Array.from(text.matchAll(RECORDED), ([, , name = ""]) => name);

/** A page with the rows of `docs/bench/NAME.json` after each `<!-- bench NAME: made -->`, or those whose names have a text: `<!-- bench NAME, TEXT: made -->`. */
export const withRecords = (text: string): string =>
  text.replace(RECORDED, (_, begin: string, name: string, part: string | undefined, end: string) => {
    const runs = JSON.parse(readFileSync(join(root, `docs/bench/${name}.json`), "utf8")) as readonly Run[];
    const tables = runs
      .map((run) => ({ ...run, rows: run.rows.filter(({ what }) => what.includes(part ?? "")) }))
      .filter(({ rows }) => rows.length > 0)
      .sort((one, other) => other.rows.length - one.rows.length);
    if (tables.length === 0) throw new Error(`docs/bench/${name}.json has no row with ${part}`);
    return `${begin}\n${tables.map(recorded).join("\n")}\n${end}`;
  });

/** Of a run on a machine that had more to do than it has cores. The load after it is also its own. */
const BUSY =
  " The load was above the number of cores, so times are mostly waits for a core: ratios still compare both sides, goals in ms say little.";

const recorded = ({ date, command, machine, kernel, node, nixl, load, rows }: Run): string =>
  `${date}, \`${command}\`: \`${machine}\`, Linux ${kernel}, Node ${node}, NIXL ${nixl}; load ${load.before} before, ${load.after} after.${load.before > 1.5 * Number.parseInt(machine, 10) ? BUSY : ""}

| what | ours | compared with | ratio | rounds | goal | |
| --- | --- | --- | ---: | ---: | --- | --- |
${rows.map(recordedRow).join("\n")}
`;

const recordedRow = ({ what, ours, theirs, ratio, rounds, wanted, met }: Row): string =>
  `| ${[what, ours, theirs, ratio ?? "", rounds ?? "", wanted, met === undefined ? "" : met ? "met" : "**missed**"].join(" | ")} |`;

/** A page with this table between its marks `<!-- NAME: made -->` and `<!-- end -->`. Throws where it has no such marks. */
export function withMade(text: string, name: string, rows: readonly (readonly string[])[]): string {
  const begin = `<!-- ${name}: made -->\n`;
  const from = text.indexOf(begin);
  const to = text.indexOf("<!-- end -->", from);
  if (from < 0 || to < 0) throw new Error(`the page has no ${begin.trim()} before <!-- end -->`);
  const [head = [], ...rest] = rows;
  const lines = [head, head.map(() => "---"), ...rest].map((cells) => `| ${cells.join(" | ")} |\n`);
  return text.slice(0, from + begin.length) + lines.join("") + text.slice(to);
}
