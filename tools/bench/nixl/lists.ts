import { readFileSync, writeFileSync } from "node:fs";
import { performance } from "node:perf_hooks";
import { nodeTarget } from "../python-peer.js";
import { alone, compare, median, type Row, spread } from "../report.js";
import { type BenchFixture, LENGTH_BYTES, type Place, series, withoutPython } from "./fixture.js";

const MILLION = 1_000_000;
const MILLION_BLOCK = 512;
const LAYERS = 80;
const BLOCKS_OF_A_LAYER = 100_000;
const SMALL_BLOCK = 64;
/** Counts as no time: a call and its answer take some tens of microseconds. */
const WANTED_ON_THREAD_MS = 1;
/** A list is kept as its rows, 80 of 40 bytes; the rest is for the heaps. */
const WANTED_GROWTH_MIB = 64;
/** V8 compiles the code during the first ones. */
const HANDSHAKES = 121;

/** Calls, callbacks and garbage collection, without waits for events. */
async function onThread<T>(work: () => Promise<T>): Promise<{ value: T; busyMs: number }> {
  const before = performance.eventLoopUtilization();
  const value = await work();
  return { value, busyMs: performance.eventLoopUtilization(before).active };
}

async function peakGrowthMib<T>(work: () => Promise<T>): Promise<{ value: T; growthMib: number }> {
  const peakKib = () =>
    Number(/^VmHWM:\s+(\d+) kB$/m.exec(readFileSync("/proc/self/status", "utf8"))?.[1]);
  // Resets the peak to the current size; see proc(5).
  writeFileSync("/proc/self/clear_refs", "5");
  const before = peakKib();
  const value = await work();
  return { value, growthMib: (peakKib() - before) / 1024 };
}

/** Python's are of an array of numpy. */
export async function bigList(fixture: BenchFixture) {
  const what = "list of 1M descriptors";
  const { address } = fixture.memory;
  const layers = layerRows(address, MILLION / LAYERS, MILLION_BLOCK);
  const scattered = scatteredRows(address);
  return [
    ...(await listRows(fixture, `${what} in ${LAYERS} rows, as plans make them`, layers, 1.15)),
    ...(await listRows(
      fixture,
      `${what}, each a row of its own, taken over`,
      scattered,
      1.15,
      true,
    )),
    ...(await listRows(fixture, `${what}, each a row of its own, copied`, scattered)),
  ];
}

async function listRows(
  { agent, python, rounds }: BenchFixture,
  what: string,
  rows: Float64Array,
  wanted?: number,
  takeRows = false,
) {
  // Tables that are allocated between the rounds would be garbage-collected within them.
  const tables = Array.from({ length: rounds + 1 }, () => (takeRows ? rows.slice() : rows));
  const { ours, theirs, busy } = await series(rounds, async (round) => {
    const table = { memoryType: "DRAM", rows: tables[round + 1] ?? rows, takeRows } as const;
    const own = await withoutPython(python, async () => {
      const begun = performance.now();
      const { value, busyMs } = await onThread(() => agent.prepareLocal(table));
      const ours = performance.now() - begun;
      await value.close();
      return { ours, busy: busyMs };
    });
    const request = { do: "list", block: MILLION_BLOCK, count: MILLION };
    return { ...own, theirs: (await python.ask<{ ms: number }>(request)).ms };
  });
  const judged = onThreadRow(what, busy);
  return [
    compare(`${what}: time / Python's`, [ours, theirs], "ms", "<=", wanted),
    wanted === undefined ? { ...judged, wanted: "reported", met: undefined } : judged,
  ];
}

function onThreadRow(what: string, busyMs: readonly number[], leastMs?: readonly number[]): Row {
  const busy = median(busyMs.map((ms, round) => ms - (leastMs?.[round] ?? 0)));
  return alone(
    `${what}: time on the JavaScript thread; ${WANTED_ON_THREAD_MS} ms stands for 0`,
    spread(busyMs, "ms"),
    `<= ${WANTED_ON_THREAD_MS} ms (is ${busy.toFixed(2)})`,
    busy <= WANTED_ON_THREAD_MS,
    leastMs === undefined ? "-" : spread(leastMs, "ms"),
    busyMs.length,
  );
}

const layerRows = (address: number, blocks: number, length: number): Float64Array =>
  Float64Array.from(
    Array.from({ length: LAYERS }, (_, at) => [
      address + at * blocks * length,
      length,
      0,
      length,
      blocks,
    ]).flat(),
  );

/** Blocks of the memory without adjacent neighbours: nothing can be merged into a stride. */
function scatteredRows(address: number): Float64Array {
  const rows = new Float64Array(5 * MILLION);
  for (let i = 0; i < MILLION; i += 1) {
    const place = ((i * 7919) % MILLION) * MILLION_BLOCK;
    rows.set([address + place, MILLION_BLOCK, 0, MILLION_BLOCK, 1], 5 * i);
  }
  return rows;
}

export async function handshake(fixture: BenchFixture) {
  const { agent, memory, python, rounds } = fixture;
  const rows: Row[] = [];
  const far = nodeTarget(fixture.backend);
  try {
    const open = { do: "open", lengthBytes: LENGTH_BYTES };
    const { metadata, address, name } = await far.ask<Place>(open);
    const ready = async (table: (base: number) => Float64Array) => {
      const begun = performance.now();
      await agent.addRemote(Buffer.from(metadata, "hex"));
      const [local, remote] = await Promise.all([
        agent.prepareLocal({ memoryType: "DRAM", rows: table(memory.address) }),
        agent.prepareRemote(name, { memoryType: "DRAM", rows: table(address) }),
      ]);
      return { begun, ms: performance.now() - begun, local, remote };
    };
    const forget = async ({ local, remote }: Awaited<ReturnType<typeof ready>>) => {
      await local.close();
      await remote.close();
      await agent.removeRemote(name);
    };
    for (const count of [1000, 50_000]) {
      const block = 4096;
      const request = { do: "handshake", metadata, address, block, count };
      const handshakes = rounds < 7 ? rounds : HANDSHAKES;
      const { ours, theirs } = await series(handshakes, async () => {
        const ours = await withoutPython(python, async () => {
          const made = await ready((base) => Float64Array.of(base, block, 0, block, count));
          await forget(made);
          return made.ms;
        });
        return { ours, theirs: (await python.ask<{ ms: number }>(request)).ms };
      });
      const what = `handshake with a warm backend, ${count} descriptors: time / Python's`;
      rows.push(compare(what, [ours, theirs], "ms", "<=", 1));
    }

    const first = (blocks: number) => async () => {
      const made = await ready((base) => layerRows(base, blocks, SMALL_BLOCK));
      const ids = Int32Array.of(0, blocks * LAYERS - 1);
      const { local, remote } = made;
      await agent.transfer({ operation: "READ", local, localIds: ids, remote, remoteIds: ids })
        .done;
      return { ...made, tookMs: performance.now() - made.begun };
    };
    // Python's polling thread would be measured where it takes the core.
    const { times, grown, busy, few } = await withoutPython(python, () =>
      series(rounds, async () => {
        // The time that does not depend on the number of descriptors.
        const least = await onThread(first(1));
        await forget(least.value);
        const most = await peakGrowthMib(() => onThread(first(BLOCKS_OF_A_LAYER)));
        const { value, busyMs } = most.value;
        await forget(value);
        return { times: value.tookMs, grown: most.growthMib, busy: busyMs, few: least.busyMs };
      }),
    );
    const what =
      "first request at 8,000,000 descriptors (80 layers x 100,000 blocks), lists of both sides made";
    const growth = `${what}: growth of the process's memory at its peak; the largest counts`;
    const isSmall = Math.max(...grown) <= WANTED_GROWTH_MIB;
    rows.push(
      alone(what, spread(times, "ms"), "<= 1000 ms", median(times) <= 1000, "-", rounds),
      alone(growth, spread(grown, "MiB"), `<= ${WANTED_GROWTH_MIB} MiB`, isSmall, "-", rounds),
      onThreadRow(`${what} (over the same with ${LAYERS} descriptors)`, busy, few),
    );
    return rows;
  } finally {
    await far.close();
  }
}
