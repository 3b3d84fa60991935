// What a turn costs that is read back from D (kv-proxy --readback), against the same router without it. `links`: in virtual time, with the times of a model of 8 billion parameters;
// `processes`: the demo's engines over NIXL, each in its own process; `live`: vLLM 0.33 on the CPU.
import { mkdir, writeFile } from "node:fs/promises";
import { median, type Row } from "../report.js";
import { type Held, LINKS_GBITS, onLink } from "./links.js";
import { liveTurns } from "./live.js";
import { throughProcesses } from "./processes.js";
import {
  AGENTS,
  type EndedTurn,
  paysFrom,
  type Ratios,
  ratios,
  type readTurns,
  tokensPerSecond,
} from "./traffic.js";

const DOCUMENT = new URL("../../docs/bench/multi-turn.md", import.meta.url);
/** Wanted of the turns after the first: in so many P computes the new tokens and less than a block. */
const NEW_ONLY_SHARE = 0.99;
/** D's time for each further token grows by at most this. */
const DECODE_RATIO = 1.03;
/** And D generates at least so many tokens a second. */
const THROUGHPUT_RATIO = 0.97;

interface Compared {
  readonly name: string;
  readonly ratios: Ratios;
}

const tokenMs = (turns: readonly EndedTurn[]) => median(turns.map((turn) => turn.tokenMs));
const ttftMs = (turns: readonly EndedTurn[]) =>
  median(turns.filter(({ turn }) => turn > 1).map((turn) => turn.ttftMs));

function ttftRow(what: string, on: readonly EndedTurn[], off: readonly EndedTurn[]): Row {
  const [ours, theirs] = [ttftMs(on), ttftMs(off)];
  return {
    ...{ what: `${what}: TTFT of turns after the first`, ours: `${ours.toFixed(1)} ms` },
    ...{ theirs: `${theirs.toFixed(1)} ms`, ratio: ours / theirs, wanted: "reported", met: undefined },
  };
}

/** Runs the parts `links`, `processes` and `live`, or those of `only`. `links` writes docs/bench/multi-turn.md. */
export async function multiTurn(
  only: readonly string[] = ["links", "processes", "live"],
): Promise<readonly Row[]> {
  return [
    ...(only.includes("links") ? await links() : []),
    ...(only.includes("processes") ? await processes() : []),
    ...(only.includes("live") ? await live() : []),
  ];
}

async function links(): Promise<readonly Row[]> {
  const rows: Row[] = [];
  const compared: Compared[] = [];
  for (const linkGbits of LINKS_GBITS)
    for (const caches of [false, true]) {
      const name = `${linkGbits} Gb/s, P ${caches ? "with" : "without"} a prefix cache`;
      process.stderr.write(`  ${name}\n`);
      const on = await onLink(linkGbits, caches, true);
      const off = await onLink(linkGbits, caches, false);
      compared.push({ name, ratios: ratios(on.turns, off.turns) });
      rows.push(ttftRow(name, on.turns, off.turns), ...heldRows(name, on, off));
    }
  if (!process.argv.includes("--no-docs")) {
    await mkdir(new URL(".", DOCUMENT), { recursive: true });
    await writeFile(DOCUMENT, document(compared, rows));
  }
  return rows;
}

function newOnlyRow(what: string, { further, newOnly }: ReturnType<typeof readTurns>): Row {
  const share = newOnly / further;
  return {
    ...{ what: `${what}: turns in which P computed the new tokens and less than a block` },
    ...{ ours: `${newOnly} of ${further}`, theirs: "-", ratio: share },
    ...{ wanted: `>= ${NEW_ONLY_SHARE}`, met: share >= NEW_ONLY_SHARE },
  };
}

function heldRows(name: string, on: Held, off: Held): readonly Row[] {
  const [ours, theirs] = [tokenMs(on.turns), tokenMs(off.turns)];
  const [rate, rateOff] = [on, off].map(({ turns }) => tokensPerSecond(turns, AGENTS.outputTokens));
  const throughput = (rate ?? 0) / (rateOff ?? 1);
  return [
    newOnlyRow(name, on.read),
    {
      ...{ what: `${name}: tokens that P computed`, ours: `${on.computedTokens}` },
      ...{ theirs: `${off.computedTokens}`, ratio: on.computedTokens / off.computedTokens },
      ...{ wanted: "reported", met: undefined },
    },
    {
      ...{ what: `${name}: D's time for each further token`, ours: `${ours.toFixed(2)} ms` },
      ...{ theirs: `${theirs.toFixed(2)} ms`, ratio: ours / theirs },
      ...{ wanted: `<= ${DECODE_RATIO}`, met: ours / theirs <= DECODE_RATIO },
    },
    {
      ...{ what: `${name}: D's tokens a second`, ours: `${rate?.toFixed(0)}` },
      ...{ theirs: `${rateOff?.toFixed(0)}`, ratio: throughput },
      ...{ wanted: `>= ${THROUGHPUT_RATIO}`, met: throughput >= THROUGHPUT_RATIO },
    },
  ];
}

async function processes(): Promise<readonly Row[]> {
  const name = "demo over NIXL, an instance replaced after every 50 requests";
  const on = await throughProcesses(true);
  const off = await throughProcesses(false);
  process.stderr.write(`  ${JSON.stringify({ ...on, turns: on.turns.length })}\n`);
  process.stderr.write(`  ${JSON.stringify(ratios(on.turns, off.turns))}\n`);
  return [ttftRow(name, on.turns, off.turns), newOnlyRow(name, on.read)];
}

async function live(): Promise<readonly Row[]> {
  const name = "vLLM 0.33 on the CPU";
  const { on, off, read, computed } = await liveTurns();
  process.stderr.write(`  ${JSON.stringify(ratios(on, off))}\n`);
  return [
    ttftRow(name, on, off),
    newOnlyRow(name, read),
    {
      ...{ what: `${name}: tokens that P computed`, ours: `${computed.on}` },
      ...{ theirs: `${computed.off}`, ratio: computed.on / computed.off, wanted: "reported", met: undefined },
    },
  ];
}

function document(compared: readonly Compared[], rows: readonly Row[]): string {
  const { conversations, turns, firstTokens, addedTokens, outputTokens } = AGENTS;
  const table = (what: "byLength" | "byTurn", head: string) =>
    compared
      .flatMap(({ name, ratios: of }) =>
        of[what].map(
          ({ end, onMs, offMs, ratio }) =>
            `| ${name} | ${head} ${end} | ${onMs.toFixed(0)} | ${offMs.toFixed(0)} | ${ratio.toFixed(2)} |`,
        ),
      )
      .join("\n");
  const pays = compared.map(({ name, ratios: of }) => {
    const from = paysFrom(of);
    return `| ${name} | ${from === undefined ? "never" : from === 0 ? "the second turn" : `${from} tokens`} |`;
  });
  return `# What a turn costs that is read back

Written by \`npm run bench -- multi-turn --only links\`. ${conversations} conversations at once of ${turns} turns: ${firstTokens} tokens, ${Math.min(...addedTokens)} to ${Math.max(...addedTokens)} more in each turn, and ${outputTokens} of output. \`kv-proxy\`, the pull connectors and the schedulers are the production code, on a
virtual clock, with one P and one D and the times of a model of 8 billion parameters (20,000 prompt tokens a second, 8 ms for a step of D, 128 KiB of KV a token). Compared is the same router with and without \`--readback\`.

| | with | without | ratio | wanted |
| --- | --- | --- | --- | --- |
${rows.map(({ what, ours, theirs, ratio, wanted }) => `| ${what} | ${ours} | ${theirs} | ${ratio?.toFixed(3) ?? "-"} | ${wanted} |`).join("\n")}

## Time to the first token

Medians, in ms, of turns after the first.

| | prompt's tokens | with | without | ratio |
| --- | --- | --- | --- | --- |
${table("byLength", "up to")}

| | turn | with | without | ratio |
| --- | --- | --- | --- | --- |
${table("byTurn", "up to")}

## From where it pays

The shortest prompts from which it is at least 3 % faster, and for all longer ones too.

| | from |
| --- | --- |
${pays.join("\n")}

A P that has the prompts in its own prefix cache computes little without readback too: then only the last answer is read, and what the cache has lost.
`;
}
