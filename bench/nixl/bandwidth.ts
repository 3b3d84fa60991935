import { existsSync } from "node:fs";
import { availableParallelism } from "node:os";
import { performance } from "node:perf_hooks";
import type { TransferRequest } from "@kv/interface";
import { describePlugins, findLibrary } from "@kv/nixl";
import { nodeTarget, pythonNixl } from "../python-peer.js";
import { alone, compare, type Row, spread } from "../report.js";
import {
  type BenchFixture,
  inOrder,
  LENGTH_BYTES,
  lists,
  openFixture,
  type Place,
  ROUNDS,
  shuffled,
} from "./fixture.js";

const BLOCKS = [4, 64, 1024].map((kib) => kib * 1024);
/** Sizes and blocks of the transfers, in bytes. */
const CASES = [64 * 2 ** 20, 512 * 2 ** 20].flatMap((size) => BLOCKS.map((block) => ({ size, block })));
/** In a GPU the driver copies block by block: 131,072 blocks would take a second. */
const GPU_CASES = CASES.filter(({ size, block }) => size / block <= 16_384);
const GPU = "UCX, memory of a GPU";
/**
 * The goal relative to Python, and the pauses between Python's polls of a transfer, in ms. Over UCX the post is the copy, so there is nothing to poll. Over
 * LIBFABRIC the target and NIXL's own thread need a core meanwhile, which busy polling takes from them: the better of Python's results counts.
 */
const WANTED = {
  UCX: { ofPython: 0.97, pausesMs: [0] },
  [GPU]: { ofPython: 0.97, pausesMs: [0] },
  LIBFABRIC: { ofPython: 0.95, pausesMs: [0, 1] },
} as const;
/** Goals relative to Python with pages of 4 KiB, by the size of a block. */
const WANTED_OF_OWN_MEMORY: Readonly<Record<number, number>> = { 4096: 1.5, 65536: 1.25, 1048576: 1 };
/** Goals relative to process_vm_readv, with which UCX copies on one host. */
const LIMITS = [
  { what: "contiguous", block: 2 ** 20, order: "contiguous", wanted: 0.9 },
  { what: "scattered 64 KiB", block: 65_536, order: "scattered", wanted: 0.6 },
  { what: "scattered 4 KiB", block: 4096, order: "scattered", wanted: undefined },
] as const;

/** A transfer that Python makes and polls, with a pause of `pauseMs` between two polls. */
interface PythonMove {
  readonly operation: "READ" | "WRITE";
  readonly block: number;
  readonly count: number;
  readonly pauseMs: number;
}

const show = (bytes: number) => (bytes >= 2 ** 20 ? `${bytes / 2 ** 20} MiB` : `${bytes / 1024} KiB`);

/** READ and WRITE over UCX against Python NIXL, alternating, with the same target and ids. */
export const bandwidth = (fixture: BenchFixture): Promise<Row[]> => againstPython(fixture, "UCX");

/**
 * READ and WRITE over UCX with the memory that each side's users have: of `allocate` at both ends here, and pages of 4 KiB at both ends for Python, as PyTorch
 * gives them to vLLM for a cache in DRAM. Both targets run this package, so that neither takes a core.
 */
export async function ownMemory({ agent, memory, target, python: idle }: BenchFixture): Promise<Row[]> {
  idle.pause();
  const [python, pythonTarget] = [await pythonNixl(), nodeTarget("UCX")];
  const [lengthBytes, hugePages] = [LENGTH_BYTES, false];
  const far = await pythonTarget.ask<Place & { metadata: string }>({ do: "open", lengthBytes, hugePages });
  const { metadata, address } = far;
  await python.ask({ do: "open", length: lengthBytes, hugePages, metadata, address });
  const rows: Row[] = [];
  for (const block of BLOCKS) {
    const count = lengthBytes / block;
    const prepared = await lists({ agent, memory, target }, block, count);
    const [localIds, remoteIds] = [shuffled(count, 1), shuffled(count, 2)];
    for (const operation of ["READ", "WRITE"] as const) {
      const ours: number[] = [];
      const theirs: number[] = [];
      for (let round = -1; round < ROUNDS; round += 1) {
        const ms = await oursMs({ agent, python }, { operation, ...prepared, localIds, remoteIds });
        const otherMs = await pythonMs({ python }, { operation, block, count, pauseMs: 0 });
        if (round < 0) continue;
        ours.push(lengthBytes / ms / 1e6);
        theirs.push(lengthBytes / otherMs / 1e6);
      }
      const what = `${operation} ${show(lengthBytes)} in ${show(block)}, scattered, UCX, each with its own memory: bandwidth / Python's`;
      rows.push(compare(what, [ours, theirs], "GB/s", ">=", WANTED_OF_OWN_MEMORY[block]));
    }
    await prepared.close();
  }
  await python.close();
  await pythonTarget.close();
  idle.resume();
  return rows;
}

/** The same over LIBFABRIC, whose provider is tcp where there is no faster one. */
export async function libfabric(ucx: BenchFixture): Promise<Row[]> {
  const [plugin] = await describePlugins({ libraryPath: await findLibrary(), names: ["LIBFABRIC"] });
  if (plugin?.loads !== true) {
    const theirs = plugin?.remedy ?? "NIXL has no such plugin";
    return [alone("LIBFABRIC", "-", ">= 0.95", undefined, theirs)];
  }
  ucx.python.pause();
  const fixture = await openFixture("LIBFABRIC");
  try {
    return [...(await againstPython(fixture, "LIBFABRIC")), await writtenTo(fixture)];
  } finally {
    await fixture.close();
    ucx.python.resume();
  }
}

/** Time of one transfer of ours. Python's progress thread uses most of a core even when idle, so that process is stopped. */
async function oursMs(
  { agent, python }: Pick<BenchFixture, "agent" | "python">,
  request: TransferRequest,
): Promise<number> {
  python.pause();
  const ms = await timed(() => agent.transfer(request).done);
  python.resume();
  return ms;
}

async function pythonMs({ python }: Pick<BenchFixture, "python">, move: PythonMove): Promise<number> {
  const { ms } = await python.ask<{ ms: number }>({ do: "move", seeds: [1, 2], ...move });
  return ms;
}

async function againstPython(fixture: BenchFixture, where: keyof typeof WANTED): Promise<Row[]> {
  const { ofPython, pausesMs } = WANTED[where];
  const rows: Row[] = [];
  for (const { size, block } of where === GPU ? GPU_CASES : CASES) {
    const count = size / block;
    const prepared = await lists(fixture, block, count);
    const [localIds, remoteIds] = [shuffled(count, 1), shuffled(count, 2)];
    for (const operation of ["READ", "WRITE"] as const) {
      const ours: number[] = [];
      const theirs: number[] = [];
      const move = { operation, block, count } as const;
      const mine = () => oursMs(fixture, { operation, ...prepared, localIds, remoteIds });
      const python = async () => {
        let best = Number.POSITIVE_INFINITY;
        for (const pauseMs of pausesMs) best = Math.min(best, await pythonMs(fixture, { ...move, pauseMs }));
        return best;
      };
      for (let round = -1; round < ROUNDS; round += 1) {
        // The sides take turns at going first, because the second one finds warm caches.
        const first = round % 2 === 0 ? await mine() : Number.NaN;
        const ms = await python();
        const mineMs = Number.isNaN(first) ? await mine() : first;
        if (round < 0) continue;
        ours.push(size / mineMs / 1e6);
        theirs.push(size / ms / 1e6);
      }
      const what = `${operation} ${show(size)} in ${show(block)}, scattered, ${where}: bandwidth / Python's`;
      rows.push(compare(what, [ours, theirs], "GB/s", ">=", ofPython));
    }
    await prepared.close();
  }
  return rows;
}

/** READ and WRITE between memory of the first GPU in two processes. */
export async function gpu(ucx: BenchFixture): Promise<Row[]> {
  if (!existsSync("/dev/nvidia0")) {
    const what = "READ and WRITE, memory of a GPU";
    const theirs = "no GPU here: there is no /dev/nvidia0";
    return [alone(what, "-", ">= 0.97", undefined, theirs)];
  }
  ucx.python.pause();
  const fixture = await openFixture("UCX", { memoryType: "VRAM" });
  try {
    return await againstPython(fixture, GPU);
  } finally {
    await fixture.close();
    ucx.python.resume();
  }
}

/** What UCX's parameter `num_threads` gains: the bandwidth with 4 threads / with none, against the same of Python. */
export async function threads(none: BenchFixture): Promise<Row[]> {
  const cores = availableParallelism();
  if (cores < 8) {
    const theirs = `8 cores are needed, here are ${cores}`;
    return [alone("num_threads", "-", ">= 1", undefined, theirs)];
  }
  const four = await openFixture("UCX", { numThreads: 4 });
  const rows: Row[] = [];
  const [size, sides] = [LENGTH_BYTES, [none, four]];
  for (const block of BLOCKS) {
    const count = size / block;
    const [localIds, remoteIds] = [shuffled(count, 1), shuffled(count, 2)];
    const prepared = await Promise.all(sides.map((fixture) => lists(fixture, block, count)));
    for (const operation of ["READ", "WRITE"] as const) {
      const [ours, theirs]: [number[], number[]] = [[], []];
      const withFour: number[][] = [[], []];
      for (let round = -1; round < ROUNDS; round += 1) {
        const [mine, python]: [number[], number[]] = [[], []];
        for (const [index, fixture] of sides.entries()) {
          const both = prepared[index];
          if (both === undefined) throw new Error("no lists");
          sides[1 - index]?.python.pause();
          mine.push(await oursMs(fixture, { operation, ...both, localIds, remoteIds }));
          python.push(await pythonMs(fixture, { operation, block, count, pauseMs: 0 }));
          sides[1 - index]?.python.resume();
        }
        if (round < 0) continue;
        ours.push((mine[0] ?? Number.NaN) / (mine[1] ?? Number.NaN));
        theirs.push((python[0] ?? Number.NaN) / (python[1] ?? Number.NaN));
        for (const [at, side] of [mine, python].entries())
          withFour[at]?.push(size / (side[1] ?? Number.NaN) / 1e6);
      }
      const what = `${operation} ${show(size)} in ${show(block)}, scattered: bandwidth with num_threads 4 / with 0, over Python's`;
      const row = compare(what, [ours, theirs], "times", ">=", 1);
      const both = [row.ours, row.theirs].map(
        (times, at) => `${times}, with 4: ${spread(withFour[at] ?? [], "GB/s")}`,
      );
      rows.push({ ...row, ours: both[0] ?? "", theirs: both[1] ?? "" });
    }
    for (const { close } of prepared) await close();
  }
  await four.close();
  return rows;
}

/** WRITE to an agent of ours and to a Python agent, whose progress thread polls without a pause: over TCP the receiver takes part. */
async function writtenTo(fixture: BenchFixture): Promise<Row> {
  const [size, block] = [512 * 2 ** 20, 65_536];
  const count = size / block;
  const python = await fixture.python.ask<Place & { metadata: string }>({ do: "metadata" });
  await fixture.agent.addRemote(Buffer.from(python.metadata, "hex"));
  const [toOurs, toPython] = [
    await lists(fixture, block, count),
    await lists({ ...fixture, target: python }, block, count),
  ];
  const [localIds, remoteIds] = [shuffled(count, 1), shuffled(count, 2)];
  const write = (prepared: typeof toOurs) =>
    timed(() => fixture.agent.transfer({ operation: "WRITE", ...prepared, localIds, remoteIds }).done);
  const ours: number[] = [];
  const theirs: number[] = [];
  for (let round = -1; round < ROUNDS; round += 1) {
    fixture.python.pause();
    const ms = await write(toOurs);
    fixture.python.resume();
    const otherMs = await write(toPython);
    if (round < 0) continue;
    ours.push(size / ms / 1e6);
    theirs.push(size / otherMs / 1e6);
  }
  await toOurs.close();
  await toPython.close();
  const what =
    "WRITE 512 MiB in 64 KiB, scattered, LIBFABRIC, by ours: bandwidth to an agent of ours / to one of Python's";
  return compare(what, [ours, theirs], "GB/s", ">=");
}

/** READ against the kernel's limit: process_vm_readv with one call for each block, as UCX does, and with 512 blocks per call. */
export async function limits(fixture: BenchFixture): Promise<Row[]> {
  const rows: Row[] = [];
  const size = 256 * 2 ** 20;
  for (const { what, block, order, wanted } of LIMITS) {
    const count = size / block;
    const prepared = await lists(fixture, block, count);
    const ids = (seed: number) => (order === "contiguous" ? inOrder(count) : shuffled(count, seed));
    const [localIds, remoteIds] = [ids(1), ids(2)];
    const ours: number[] = [];
    const single: number[] = [];
    const vectored: number[] = [];
    const request = {
      do: "vm_read",
      pid: fixture.target.pid,
      block,
      count,
      seeds: order === "contiguous" ? null : [1, 2],
    };
    for (let round = -1; round < ROUNDS; round += 1) {
      const mine = await timed(
        () => fixture.agent.transfer({ operation: "READ", ...prepared, localIds, remoteIds }).done,
      );
      const one = await fixture.python.ask<{ ms: number }>({ ...request, vector: 1 });
      const many = await fixture.python.ask<{ ms: number }>({ ...request, vector: 512 });
      if (round < 0) continue;
      ours.push(size / mine / 1e6);
      single.push(size / one.ms / 1e6);
      vectored.push(size / many.ms / 1e6);
    }
    const bare = `READ 256 MiB ${what}: bandwidth / process_vm_readv, a call for each block`;
    rows.push(compare(bare, [ours, single], "GB/s", ">=", wanted));
    await prepared.close();
    if (order === "contiguous") continue;
    const around = `a way around UCX, ${what}: process_vm_readv of 512 blocks a call / READ`;
    rows.push(compare(around, [vectored, ours], "GB/s", ">="));
  }
  return rows;
}

async function timed(work: () => Promise<unknown>): Promise<number> {
  const begun = performance.now();
  await work();
  return performance.now() - begun;
}
