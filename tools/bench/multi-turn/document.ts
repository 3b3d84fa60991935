import { readFile, writeFile } from "node:fs/promises";
import type { Row } from "../report.js";
import { paysFrom, type Ratios } from "./traffic.js";

const DOCUMENT = new URL("../../../docs/bench/multi-turn.md", import.meta.url);
const TITLE = `# What a turn costs that is read back

Compared is the same router with and without \`--readback\`. Times to the first token are medians of turns after the first.
`;

/** The parts of the benchmark, with their headings. */
const HEADINGS = {
  links: "Links of 25 to 400 Gb/s, simulated",
  processes: "The demo's engines over NIXL",
  live: "vLLM 0.33 on the CPU",
} as const;

export interface Compared {
  readonly name: string;
  readonly ratios: Ratios;
}

export interface Section {
  readonly intro: string;
  readonly rows: readonly Row[];
  readonly compared: readonly Compared[];
  readonly after?: string;
}

/**
 * Writes a part's section of docs/bench/multi-turn.md with `--record`; those of the other parts
 * stay.
 */
export async function writeSection(part: keyof typeof HEADINGS, section: Section): Promise<void> {
  if (!process.argv.includes("--record") || process.argv.includes("--short")) return;
  const [, ...before] = (await readFile(DOCUMENT, "utf8")).split(/^(?=## )/m);
  const texts = Object.entries(HEADINGS).map(([name, heading]) =>
    name === part
      ? textOf(heading, section)
      : before.find((text) => text.startsWith(`## ${heading}\n`))?.trimEnd(),
  );
  await writeFile(DOCUMENT, `${[TITLE.trimEnd(), ...texts.filter(Boolean)].join("\n\n")}\n`);
}

function textOf(heading: string, { intro, rows, compared, after }: Section): string {
  const table = (what: "byLength" | "byTurn") =>
    compared
      .flatMap(({ name, ratios }) =>
        ratios[what].map(
          ({ end, onMs, offMs, ratio }) =>
            `| ${name} | up to ${end} | ${onMs.toFixed(0)} | ${offMs.toFixed(0)} | ${ratio.toFixed(2)} |`,
        ),
      )
      .join("\n");
  const pays = compared.map(({ name, ratios }) => {
    const from = paysFrom(ratios);
    return `| ${name} | ${from === undefined ? "never" : from === 0 ? "the second turn" : `${from} tokens`} |`;
  });
  return `## ${heading}

${intro}

| | with | without | ratio | wanted |
| --- | --- | --- | --- | --- |
${rows.map(({ what, ours, theirs, ratio, wanted }) => `| ${what} | ${ours} | ${theirs} | ${ratio?.toFixed(3) ?? "-"} | ${wanted} |`).join("\n")}

Time to the first token in ms, by the length of the prompt in tokens, and by turn:

| | prompt | with | without | ratio |
| --- | --- | --- | --- | --- |
${table("byLength")}

| | turn | with | without | ratio |
| --- | --- | --- | --- | --- |
${table("byTurn")}

From where it pays: the shortest prompts from which it is at least 3 % faster, and for all longer ones too.

| | from |
| --- | --- |
${pays.join("\n")}${after === undefined ? "" : `\n\n${after}`}`;
}
