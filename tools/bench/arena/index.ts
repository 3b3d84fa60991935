// The routers, one after another in each round, on the same cores, with the same engines.
import { writeFile } from "node:fs/promises";
import { plot } from "../plot.js";
import { alone, compare, median, type Row } from "../report.js";
import type { Run } from "../run.js";
import { openArena } from "./arena.js";
import { CONTESTANTS } from "./contestants.js";
import { startEngines } from "./engines.js";
import { EVENTS, type Figure } from "./events.js";

const REFERENCE = "vllm-router";
const ROUNDS = 3;
const PICTURE = new URL("../../../docs/bench/arena.svg", import.meta.url);

type Event = keyof typeof EVENTS;

/** Figures of a router, by what they are of; or why it has none. */
interface Results {
  readonly figures: Map<string, { readonly figure: Figure; readonly values: number[] }>;
  readonly missing: Map<Event, string>;
}

/** `--only` names routers, events or both; of routers alone the last one is the reference. */
function chosen(only: readonly string[]) {
  const unknown = only.filter((name) => !(name in CONTESTANTS) && !(name in EVENTS));
  if (unknown.length > 0)
    throw new Error(
      `no router or event ${unknown.join(", ")}; there are ${[...Object.keys(CONTESTANTS), ...Object.keys(EVENTS)].join(", ")}`,
    );
  const some = only.filter((name) => name in CONTESTANTS);
  const events = only.filter((name): name is Event => name in EVENTS);
  const names = some.length > 0 ? some : Object.keys(CONTESTANTS);
  const reference = names.includes(REFERENCE) ? REFERENCE : (names.at(-1) ?? REFERENCE);
  return {
    // Its rate is that of the others' half load.
    names: [reference, ...names.filter((name) => name !== reference)],
    events: events.length > 0 ? events : (Object.keys(EVENTS) as Event[]),
  };
}

export async function arena(run: Run): Promise<readonly Row[]> {
  const { names, events } = chosen(run.only ?? []);
  await using shared = await openArena();
  const results = new Map<string, Results>(
    names.map((name) => [name, { figures: new Map(), missing: new Map() }]),
  );
  for (let round = 0; round < (run.short ? 1 : ROUNDS); round += 1)
    for (const event of events) {
      let halfRate: number | undefined;
      for (const [name, { figures, missing }] of results) {
        if (missing.has(event)) continue;
        process.stderr.write(`  ${event}, ${name} …\n`);
        const asked = { arena: shared, name, short: run.short, halfRate, trace: run.trace };
        const measured = await EVENTS[event](asked).catch((error: Error) => {
          missing.set(event, error.message.replace(/\s+/g, " ").slice(0, 300));
          return [];
        });
        for (const figure of measured) {
          const all = figures.get(figure.what) ?? { figure, values: [] };
          all.values.push(figure.value);
          figures.set(figure.what, all);
        }
        if (event === "load") halfRate ??= rateOf(measured);
      }
    }
  if (run.record) await writeFile(PICTURE, picture(results));
  return [...(await about(names)), ...rowsOf(results)];
}

const rateOf = (figures: readonly Figure[]) => {
  const rate = figures.find(({ what }) => what.startsWith("requests a second"))?.value;
  return rate === undefined ? undefined : Math.max(1, Math.floor(rate / 2));
};

/** Version and flags of each. */
async function about(names: readonly string[]): Promise<readonly Row[]> {
  await using engines = await startEngines("1");
  const rows: Row[] = [];
  for (const name of names) {
    const { version = "", programs } = CONTESTANTS[name] ?? {};
    const all = (await programs?.(engines, 8000).catch(() => [])) ?? [];
    const commands = all.map(({ command, args }) =>
      [command, ...args]
        .join(" ")
        .replace(/\/\S*\//g, "")
        .replace(/:\d{4,5}\b/g, ":PORT"),
    );
    rows.push(
      alone(`${name}: version and flags`, version, "reported", undefined, commands.join("; ")),
    );
  }
  return rows;
}

function rowsOf(results: ReadonlyMap<string, Results>): readonly Row[] {
  const [[reference = "", first] = [], ...others] = results;
  const rows: Row[] = [];
  for (const [name, { figures, missing }] of others.length > 0 ? others : results) {
    for (const [what, { figure, values }] of figures) {
      const theirs = first?.figures.get(what)?.values ?? values.map(() => Number.NaN);
      rows.push(rowOf(`${name} / ${reference}: ${what}`, name, figure, values, theirs));
    }
    for (const [event, why] of missing) rows.push(alone(`${name}: ${event}`, `not here: ${why}`));
  }
  return rows;
}

function rowOf(
  what: string,
  name: string,
  { unit, better, goals, laterMs }: Figure,
  ours: readonly number[],
  theirs: readonly number[],
): Row {
  const row = compare(what, [ours, theirs], unit, better, goals?.[name]);
  // None of both failed.
  const ratio = row.ratio === undefined || Number.isNaN(row.ratio) ? undefined : row.ratio;
  const equal = median(ours) === median(theirs);
  if (laterMs === undefined || name !== "kv-proxy")
    return { ...row, ratio, met: row.met === undefined ? undefined : row.met || equal };
  const later = median(ours) - median(theirs);
  return { ...row, ratio, wanted: `at most ${laterMs} ms later`, met: later <= laterMs };
}

const SIZES = [1, 20, 220];

/** Processor time per request by the size of the body, as a multiple of the reference's smallest. */
function picture(results: ReadonlyMap<string, Results>): string {
  const costOf = ({ figures }: Results, size: number) =>
    median(
      [...figures]
        .filter(([what]) =>
          what.startsWith(`processor time per request, bodies of ${size} KB, streams of 16`),
        )
        .flatMap(([, { values }]) => values),
    );
  const curves = [...results]
    .map(([name, all]) => ({ name, sizes: SIZES, costs: SIZES.map((size) => costOf(all, size)) }))
    .filter(({ costs }) => costs.every(Number.isFinite));
  return plot("Routers: processor time per request by size of the body", curves, {
    base: [1, curves[0]?.costs[0] ?? 1],
    cost: `as a multiple of that of ${curves[0]?.name} at 1 KB`,
    size: "size of the body, KB",
    note: "",
  });
}
