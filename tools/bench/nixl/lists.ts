import { execFile } from "node:child_process";
import { rmSync } from "node:fs";
import { dirname } from "node:path";
import { performance } from "node:perf_hooks";
import { promisify } from "node:util";
import { findLibrary } from "@kv/nixl";
import { compileC, compiler } from "../c-program.js";
import { nodeTarget } from "../python-peer.js";
import { alone, compare, median, type Row, spread } from "../report.js";
import { type BenchFixture, LENGTH_BYTES, ROUNDS, series } from "./fixture.js";
import { onThread, peakGrowthMib } from "./process-costs.js";

const run = promisify(execFile);
const MILLION = 1_000_000;
const MILLION_BLOCK = 512;
const LAYERS = 80;
const BLOCKS_OF_A_LAYER = 100_000;
const SMALL_BLOCK = 64;
/**
 * Less than this counts as no time on the JavaScript thread: a call and its answer take some tens
 * of microseconds.
 */
const WANTED_ON_THREAD_MS = 1;
/**
 * A list is kept as its rows, here 80 of 40 bytes; the rest is room for the heaps of V8 and of the
 * C library.
 */
const WANTED_GROWTH_MIB = 64;
/**
 * A handshake takes half a millisecond, so that many rounds cost nothing. V8 compiles the code
 * during the first ones.
 */
const HANDSHAKES = 121;

/** Lists of a million descriptors against a C loop over the same NIXL calls. */
export async function bigList(fixture: BenchFixture): Promise<Row[]> {
  const what = "list of 1M descriptors";
  if (compiler() === undefined) {
    return [alone(what, "-", "<= 1.15", undefined, "no C compiler")];
  }
  const program = await compileC("list-loop", ["-ldl"]);
  try {
    const command = [await findLibrary(), String(MILLION), String(MILLION_BLOCK)];
    const loopMs = async () => {
      const { stdout } = await run(program, command, {
        env: { ...process.env, UCX_MODULES: "^ib", UCX_LOG_FILE: "stderr", UCX_MEM_EVENTS: "n" },
      });
      return Number(stdout.trim().split("\n").at(-1));
    };
    const { address } = fixture.memory;
    const own = `${what}, each a row of its own`;
    const scattered = { fixture, loopMs, rows: scatteredRows(address) };
    return [
      ...(await listRows({
        fixture,
        loopMs,
        what: `${what} in ${LAYERS} rows, as plans make them`,
        rows: layerRows(address),
      })),
      ...(await listRows({ ...scattered, what: `${own}, taken over`, takeRows: true })),
      ...(await listRows({ ...scattered, what: `${own}, copied` })).map(reported),
    ];
  } finally {
    rmSync(dirname(program), { recursive: true });
  }
}

interface ListOptions {
  readonly fixture: BenchFixture;
  readonly what: string;
  readonly rows: Float64Array;
  readonly takeRows?: boolean;
  loopMs(): Promise<number>;
}

async function listRows(options: ListOptions): Promise<Row[]> {
  const { fixture, what, rows, takeRows = false, loopMs } = options;
  // Allocated beforehand: tables that are allocated between the rounds would be garbage-collected
  // within them.
  const tables = Array.from({ length: ROUNDS + 1 }, () => (takeRows ? rows.slice() : rows));
  fixture.python.pause();
  const { ours, theirs, busy } = await series(async (round) => {
    const table = { memoryType: "DRAM", rows: tables[round + 1] ?? rows, takeRows } as const;
    const begun = performance.now();
    const made = await onThread(() => fixture.agent.prepareLocal(table));
    const ready = performance.now();
    await made.value.close();
    return { ours: ready - begun, busy: made.busyMs, theirs: await loopMs() };
  });
  fixture.python.resume();
  const row = compare(`${what}: time / a bare C loop`, [ours, theirs], "ms", "<=", 1.15);
  return [row, onThreadRow(what, busy)];
}

/** The row without its goal: reported only. */
const reported = (row: Row): Row => ({ ...row, wanted: "reported", met: undefined });

function onThreadRow(what: string, busyMs: readonly number[], leastMs?: readonly number[]): Row {
  const busy = median(busyMs.map((ms, round) => ms - (leastMs?.[round] ?? 0)));
  const wanted = `<= ${WANTED_ON_THREAD_MS} ms (is ${busy.toFixed(2)})`;
  return alone(
    `${what}: time on the JavaScript thread; ${WANTED_ON_THREAD_MS} ms stands for 0`,
    spread(busyMs, "ms"),
    wanted,
    busy <= WANTED_ON_THREAD_MS,
    leastMs === undefined ? "-" : spread(leastMs, "ms"),
    busyMs.length,
  );
}

/** Blocks of the memory, one row for each layer. */
function layerRows(
  address: number,
  blocks = MILLION / LAYERS,
  length = MILLION_BLOCK,
): Float64Array {
  const layers = Array.from({ length: LAYERS }, (_, at) => [
    address + at * blocks * length,
    length,
    0,
    length,
  ]);
  return Float64Array.from(layers.flatMap((row) => [...row, blocks]));
}

/** Blocks of the memory without adjacent neighbours: nothing can be merged into a stride. */
function scatteredRows(address: number): Float64Array {
  const rows = new Float64Array(5 * MILLION);
  for (let i = 0; i < MILLION; i += 1) {
    const place = ((i * 7919) % MILLION) * MILLION_BLOCK;
    rows.set([address + place, MILLION_BLOCK, 0, MILLION_BLOCK, 1], 5 * i);
  }
  return rows;
}

/** The time until transfers to a new peer can be made, with a warm backend. */
export async function handshake(fixture: BenchFixture): Promise<Row[]> {
  const rows: Row[] = [];
  const far = nodeTarget(fixture.backend);
  try {
    const { metadata, address, name } = await far.ask<{
      metadata: string;
      address: number;
      name: string;
    }>({
      do: "open",
      lengthBytes: LENGTH_BYTES,
    });
    const bytes = Buffer.from(metadata, "hex");
    const ready = async (table: (base: number) => Float64Array) => {
      const begun = performance.now();
      await fixture.agent.addRemote(bytes);
      const local = fixture.agent.prepareLocal({
        memoryType: "DRAM",
        rows: table(fixture.memory.address),
      });
      const remote = fixture.agent.prepareRemote(name, {
        memoryType: "DRAM",
        rows: table(address),
      });
      const both = await Promise.all([local, remote]);
      return { ms: performance.now() - begun, both };
    };
    const forget = async (lists: readonly { close(): Promise<void> }[]) => {
      for (const list of lists) await list.close();
      await fixture.agent.removeRemote(name);
    };
    for (const count of [1000, 50_000]) {
      const block = 4096;
      const table = (base: number) => Float64Array.of(base, block, 0, block, count);
      const request = { do: "handshake", metadata, address, block, count };
      const { ours, theirs } = await series(async () => {
        fixture.python.pause();
        const { ms, both } = await ready(table);
        await forget(both);
        fixture.python.resume();
        return { ours: ms, theirs: (await fixture.python.ask<{ ms: number }>(request)).ms };
      }, HANDSHAKES);
      const what = `handshake with a warm backend, ${count} descriptors: time / Python's`;
      rows.push(compare(what, [ours, theirs], "ms", "<=", 1));
    }
    const layers = (blocks: number) => (base: number) => layerRows(base, blocks, SMALL_BLOCK);
    const first = (blocks: number) => async () => {
      const begun = performance.now();
      const { both } = await ready(layers(blocks));
      const [local, remote] = both;
      const ids = Int32Array.of(0, blocks * LAYERS - 1);
      await fixture.agent.transfer({
        operation: "READ",
        local,
        localIds: ids,
        remote,
        remoteIds: ids,
      }).done;
      return { both, tookMs: performance.now() - begun };
    };
    // Python's polling thread would be measured where it takes the core.
    fixture.python.pause();
    const { times, grown, busy, few } = await series(async () => {
      // The same calls with one block per layer: the time that does not depend on the number of
      // descriptors.
      const least = await onThread(first(1));
      await forget(least.value.both);
      const { value, growthMib } = await peakGrowthMib(() => onThread(first(BLOCKS_OF_A_LAYER)));
      await forget(value.value.both);
      return { times: value.value.tookMs, grown: growthMib, busy: value.busyMs, few: least.busyMs };
    });
    fixture.python.resume();
    const what =
      "first request at 8,000,000 descriptors (80 layers x 100,000 blocks), lists of both sides made";
    const memory = `${what}: growth of the process's memory at its peak; the largest counts`;
    const isSmall = Math.max(...grown) <= WANTED_GROWTH_MIB;
    rows.push(
      alone(what, spread(times, "ms"), "<= 1000 ms", median(times) <= 1000, "-", ROUNDS),
      alone(memory, spread(grown, "MiB"), `<= ${WANTED_GROWTH_MIB} MiB`, isSmall, "-", ROUNDS),
      onThreadRow(`${what} (over the same with ${LAYERS} descriptors)`, busy, few),
    );
    return rows;
  } finally {
    await far.close();
  }
}
