// What a turn costs that is read back from D (kv-proxy --readback), against the same router without
// it. `links`: in virtual time, with the times of a model of 8 billion parameters; `processes`: the
// demo's engines over NIXL, each in its own process (--short: fewer turns); `live`: vLLM 0.33 on
// the CPU. Each writes its section of docs/bench/multi-turn.md.
import { median, type Row, rowOf } from "../report.js";
import { type Compared, writeSection } from "./document.js";
import { type Held, LINKS_GBITS, onLink, REPLACED_EVERY, REPLACED_GBITS } from "./links.js";
import { liveTurns } from "./live.js";
import { throughProcesses } from "./processes.js";
import {
  AGENTS,
  type EndedTurn,
  ratios,
  type readTurns,
  type Traffic,
  tokensPerSecond,
} from "./traffic.js";

/**
 * Wanted of the turns after the first: in so many P computes the new tokens and less than a block.
 */
const NEW_ONLY_SHARE = 0.99;
/** D's time for each further token grows by at most this. */
const DECODE_RATIO = 1.03;
/** And D generates at least so many tokens a second. */
const THROUGHPUT_RATIO = 0.97;

const tokenMs = (turns: readonly EndedTurn[]) => median(turns.map((turn) => turn.tokenMs));
const ttftMs = (turns: readonly EndedTurn[]) =>
  median(turns.filter(({ turn }) => turn > 1).map((turn) => turn.ttftMs));

function ttftRow(on: readonly EndedTurn[], off: readonly EndedTurn[]): Row {
  const [ours, theirs] = [ttftMs(on), ttftMs(off)];
  const shown = [`${ours.toFixed(1)} ms`, `${theirs.toFixed(1)} ms`] as const;
  return rowOf("TTFT of turns after the first", shown, ours / theirs);
}

const named = (name: string, rows: readonly Row[]): readonly Row[] =>
  rows.map((row) => ({ ...row, what: `${name}: ${row.what}` }));

/** Runs the parts `links`, `processes` and `live`, or those of `only`. */
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
      const on = await onLink({ linkGbits, caches, isOn: true });
      const off = await onLink({ linkGbits, caches, isOn: false });
      compared.push({ name, ratios: ratios(on.turns, off.turns) });
      rows.push(...named(name, [ttftRow(on.turns, off.turns), ...heldRows(on, off)]));
    }
  process.stderr.write("  instances are replaced\n");
  const on = await onLink({ linkGbits: REPLACED_GBITS, isOn: true, replaces: true });
  const off = await onLink({ linkGbits: REPLACED_GBITS, isOn: false, replaces: true });
  const name = `${REPLACED_GBITS} Gb/s, ${on.replaced} instances replaced`;
  rows.push(
    ...named(name, [
      ttftRow(on.turns, off.turns),
      newOnlyRow(on.read, NEW_ONLY_SHARE),
      computedRow(on.computed, off.computed),
    ]),
  );
  await writeSection("links", {
    intro: `Written by \`npm run bench -- multi-turn --only links --record\`. ${trafficText(AGENTS)} \`kv-proxy\`, the pull connectors and the schedulers are the production code, on a
virtual clock, with one P and one D and the times of a model of 8 billion parameters (20,000 prompt tokens a second, 8 ms for a step of D, 128 KiB of KV a token). In the last rows there are two P and two D,
one of which is killed after every ${REPLACED_EVERY} requests, and another one takes its place; there the turns count whose D was not replaced.`,
    rows,
    compared,
    after:
      "A P that has the prompts in its own prefix cache computes little without readback too: then only the last answer is read, and what the cache has lost.",
  });
  return rows;
}

function trafficText({
  conversations,
  turns,
  firstTokens,
  addedTokens,
  outputTokens,
}: Traffic): string {
  return `${conversations} conversations at once of ${turns} turns: ${firstTokens} tokens, ${Math.min(...addedTokens)} to ${Math.max(...addedTokens)} more in each turn, and ${outputTokens} of output.`;
}

function newOnlyRow({ further, newOnly }: ReturnType<typeof readTurns>, wanted?: number): Row {
  const what = "turns in which P computed the new tokens and less than a block";
  return rowOf(what, [`${newOnly} of ${further}`, "-"], newOnly / further, ">=", wanted);
}

const computedRow = (on: number, off: number): Row =>
  rowOf("tokens that P computed", [`${on}`, `${off}`], on / off);

function heldRows(on: Held, off: Held): readonly Row[] {
  const [ours, theirs] = [tokenMs(on.turns), tokenMs(off.turns)];
  const [rate = 0, rateOff = 1] = [on, off].map(({ turns }) =>
    tokensPerSecond(turns, AGENTS.outputTokens),
  );
  const times = [`${ours.toFixed(2)} ms`, `${theirs.toFixed(2)} ms`] as const;
  const rates = [rate.toFixed(0), rateOff.toFixed(0)] as const;
  return [
    newOnlyRow(on.read, NEW_ONLY_SHARE),
    computedRow(on.computed, off.computed),
    rowOf("D's time for each further token", times, ours / theirs, "<=", DECODE_RATIO),
    rowOf("D's tokens a second", rates, rate / rateOff, ">=", THROUGHPUT_RATIO),
  ];
}

type Turns = Pick<Held, "turns" | "read" | "computed">;

/** Of engines that really compute; `equal` turns have the tokens of one engine. */
function realRows(on: Turns, off: Turns, equal: number): readonly Row[] {
  const all = on.turns.length;
  return [
    ttftRow(on.turns, off.turns),
    newOnlyRow(on.read),
    computedRow(on.computed, off.computed),
    {
      what: "turns with the tokens of one engine",
      ours: `${equal} of ${all}`,
      theirs: "-",
      ratio: equal / all,
      wanted: "all",
      met: equal === all,
    },
  ];
}

async function processes(): Promise<readonly Row[]> {
  const name = "two P, two D";
  const { traffic, every, on, off, equal } = await throughProcesses();
  process.stderr.write(
    `  ${JSON.stringify({ replaced: on.replaced, failed: on.failed, ...on.reasons })}\n`,
  );
  const rows = named(name, realRows(on, off, equal));
  await writeSection("processes", {
    intro: `Written by \`npm run bench -- multi-turn --only processes --record\`. ${trafficText(traffic)} \`kv-proxy\`, two P without a prefix cache and two D, over NIXL on one machine, with the demo's tiny model on the CPU.
Each is a process; one of the four in turn is killed after every ${every} requests and started again (${on.replaced} with readback, ${off.replaced} without). Clients ask again where a stream broke that had begun (${on.failed} and ${off.failed}). P computed new
tokens only in turns whose D was not replaced; the others count in the tokens that P computed.`,
    rows,
    compared: [{ name, ratios: ratios(on.turns, off.turns) }],
  });
  return rows;
}

async function live(): Promise<readonly Row[]> {
  const name = "one P, one D";
  const { traffic, on, off, equal } = await liveTurns();
  const rows = named(name, realRows(on, off, equal));
  await writeSection("live", {
    intro: `Written by \`npm run bench -- multi-turn --only live --record\`. ${trafficText(traffic)} P (without a prefix cache) and D are vLLM 0.33 with its tiny model on the CPU, with room for 8,192 tokens, and none is replaced. Without readback,
the setting is left out at vLLM too. The tokens that P computed are those of its metrics. Clients asked again ${on.failed} times with readback, and ${off.failed} times without.`,
    rows,
    compared: [{ name, ratios: ratios(on.turns, off.turns) }],
  });
  return rows;
}
