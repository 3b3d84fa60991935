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
  series,
  shuffled,
} from "./fixture.js";

const BLOCKS = [4, 64, 1024].map((kib) => kib * 1024);
/** Sizes and blocks of the transfers, in bytes. */
const CASES = [64 * 2 ** 20, 512 * 2 ** 20].flatMap((size) =>
  BLOCKS.map((block) => ({ size, block })),
);
/** In a GPU the driver copies block by block: 131,072 blocks would take a second. */
const GPU_CASES = CASES.filter(({ size, block }) => size / block <= 16_384);
/** Goals relative to Python with pages of 4 KiB, by the size of a block. */
const WANTED_OF_OWN_MEMORY: Readonly<Record<number, number>> = {
  4096: 1.5,
  65536: 1.25,
  1048576: 1,
};
/** Goals relative to process_vm_readv, with which UCX copies on one host. */
const LIMITS = [
  { what: "contiguous", block: 2 ** 20, order: "contiguous", wanted: 0.9 },
  { what: "scattered 64 KiB", block: 65_536, order: "scattered", wanted: 0.6 },
  { what: "scattered 4 KiB", block: 4096, order: "scattered", wanted: undefined },
] as const;

/** What is compared with Python. */
interface Comparison {
  readonly where: string;
  readonly cases?: typeof CASES;
  /** The goal, by the size of a block. */
  ofPython(block: number): number | undefined;
  /**
   * The pauses between Python's polls of a transfer, in ms: the better of its results counts. Over
   * UCX the post is the copy, so there is nothing to poll.
   */
  readonly pausesMs?: readonly number[];
}

/** A transfer that Python makes and polls, with a pause of `pauseMs` between two polls. */
interface PythonMove {
  readonly operation: "READ" | "WRITE";
  readonly block: number;
  readonly count: number;
  readonly pauseMs: number;
}

type Sides = Pick<BenchFixture, "agent" | "memory" | "target" | "python">;
const OPERATIONS = ["READ", "WRITE"] as const;
const show = (bytes: number) =>
  bytes >= 2 ** 20 ? `${bytes / 2 ** 20} MiB` : `${bytes / 1024} KiB`;

const gigabytes = (bytes: number, ms: number) => bytes / ms / 1e6;

/** READ and WRITE over UCX against Python NIXL, alternating, with the same target and ids. */
export const bandwidth = (fixture: BenchFixture): Promise<Row[]> =>
  againstPython(fixture, { where: "UCX", ofPython: () => 0.97 });

/**
 * READ and WRITE over UCX with the memory that each side's users have: of `allocate` at both ends
 * here, and pages of 4 KiB at both ends for Python, as PyTorch gives them to vLLM for a cache in
 * DRAM. Both targets run this package, so that neither takes a core.
 */
export async function ownMemory(fixture: BenchFixture): Promise<Row[]> {
  fixture.python.pause();
  const [python, pythonTarget] = [await pythonNixl(), nodeTarget("UCX")];
  const [lengthBytes, hugePages] = [LENGTH_BYTES, false];
  const far = await pythonTarget.ask<Place & { metadata: string }>({
    do: "open",
    lengthBytes,
    hugePages,
  });
  const { metadata, address } = far;
  await python.ask({ do: "open", length: lengthBytes, hugePages, metadata, address });
  const rows = await againstPython(
    { ...fixture, python },
    {
      where: "UCX, each with its own memory",
      cases: BLOCKS.map((block) => ({ size: lengthBytes, block })),
      ofPython: (block) => WANTED_OF_OWN_MEMORY[block],
    },
  );
  await python.close();
  await pythonTarget.close();
  fixture.python.resume();
  return rows;
}

/** The same over LIBFABRIC, whose provider is tcp where there is no faster one. */
export async function libfabric(ucx: BenchFixture): Promise<Row[]> {
  const [plugin] = await describePlugins({
    libraryPath: await findLibrary(),
    names: ["LIBFABRIC"],
  });
  if (plugin?.loads !== true) {
    const theirs = plugin?.remedy ?? "NIXL has no such plugin";
    return [alone("LIBFABRIC", "-", ">= 0.95", undefined, theirs)];
  }
  // The target and NIXL's own thread need a core meanwhile, which busy polling takes from them.
  const comparison = { where: "LIBFABRIC", ofPython: () => 0.95, pausesMs: [0, 1] };
  return beside(ucx, await openFixture("LIBFABRIC"), async (fixture) => [
    ...(await againstPython(fixture, comparison)),
    await writtenTo(fixture),
  ]);
}

/** READ and WRITE between memory of the first GPU in two processes. */
export async function gpu(ucx: BenchFixture): Promise<Row[]> {
  if (!existsSync("/dev/nvidia0")) {
    const what = "READ and WRITE, memory of a GPU";
    const theirs = "no GPU here: there is no /dev/nvidia0";
    return [alone(what, "-", ">= 0.97", undefined, theirs)];
  }
  const comparison = { where: "UCX, memory of a GPU", cases: GPU_CASES, ofPython: () => 0.97 };
  return beside(ucx, await openFixture("UCX", { memoryType: "VRAM" }), (fixture) =>
    againstPython(fixture, comparison),
  );
}

/** Measures with another fixture, and closes it. Python's process of `ucx` is stopped meanwhile. */
async function beside(
  ucx: BenchFixture,
  fixture: BenchFixture,
  measure: (fixture: BenchFixture) => Promise<Row[]>,
): Promise<Row[]> {
  ucx.python.pause();
  try {
    return await measure(fixture);
  } finally {
    await fixture.close();
    ucx.python.resume();
  }
}

/**
 * Time of one transfer of ours. Python's progress thread uses most of a core even when idle, so
 * that process is stopped.
 */
async function oursMs(
  { agent, python }: Pick<BenchFixture, "agent" | "python">,
  request: TransferRequest,
): Promise<number> {
  python.pause();
  const ms = await timed(() => agent.transfer(request).done);
  python.resume();
  return ms;
}

async function pythonMs(
  { python }: Pick<BenchFixture, "python">,
  move: PythonMove,
): Promise<number> {
  const { ms } = await python.ask<{ ms: number }>({ do: "move", seeds: [1, 2], ...move });
  return ms;
}

async function againstPython(
  fixture: Sides,
  { where, cases = CASES, ofPython, pausesMs = [0] }: Comparison,
): Promise<Row[]> {
  const rows: Row[] = [];
  for (const { size, block } of cases) {
    const count = size / block;
    const prepared = await lists(fixture, block, count);
    const [localIds, remoteIds] = [shuffled(count, 1), shuffled(count, 2)];
    for (const operation of OPERATIONS) {
      const move = { operation, block, count } as const;
      const mine = () => oursMs(fixture, { operation, ...prepared, localIds, remoteIds });
      const python = async () => {
        let best = Number.POSITIVE_INFINITY;
        for (const pauseMs of pausesMs)
          best = Math.min(best, await pythonMs(fixture, { ...move, pauseMs }));
        return best;
      };
      const { ours, theirs } = await series(async (round) => {
        // The sides take turns at going first, because the second one finds warm caches.
        const first = round % 2 === 0 ? await mine() : undefined;
        const ms = await python();
        return { ours: gigabytes(size, first ?? (await mine())), theirs: gigabytes(size, ms) };
      });
      const what = `${operation} ${show(size)} in ${show(block)}, scattered, ${where}: bandwidth / Python's`;
      rows.push(compare(what, [ours, theirs], "GB/s", ">=", ofPython(block)));
    }
    await prepared.close();
  }
  return rows;
}

/**
 * What UCX's parameter `num_threads` gains: the bandwidth with 4 threads / with none, against the
 * same of Python.
 */
export async function threads(none: BenchFixture): Promise<Row[]> {
  const cores = availableParallelism();
  if (cores < 8) {
    const theirs = `8 cores are needed, here are ${cores}`;
    return [alone("num_threads", "-", ">= 1", undefined, theirs)];
  }
  const four = await openFixture("UCX", { numThreads: 4 });
  const rows: Row[] = [];
  const size = LENGTH_BYTES;
  for (const block of BLOCKS) {
    const count = size / block;
    const [localIds, remoteIds] = [shuffled(count, 1), shuffled(count, 2)];
    const [listsOfNone, listsOfFour] = [
      await lists(none, block, count),
      await lists(four, block, count),
    ];
    for (const operation of OPERATIONS) {
      const bothMs = async (
        fixture: BenchFixture,
        other: BenchFixture,
        prepared: typeof listsOfNone,
      ) => {
        other.python.pause();
        const ours = await oursMs(fixture, { operation, ...prepared, localIds, remoteIds });
        const theirs = await pythonMs(fixture, { operation, block, count, pauseMs: 0 });
        other.python.resume();
        return { ours, theirs };
      };
      const { ours, theirs, oursWith4, theirsWith4 } = await series(async () => {
        const [without, with4] = [
          await bothMs(none, four, listsOfNone),
          await bothMs(four, none, listsOfFour),
        ];
        return {
          ours: without.ours / with4.ours,
          oursWith4: gigabytes(size, with4.ours),
          theirs: without.theirs / with4.theirs,
          theirsWith4: gigabytes(size, with4.theirs),
        };
      });
      const what = `${operation} ${show(size)} in ${show(block)}, scattered: bandwidth with num_threads 4 / with 0, over Python's`;
      const row = compare(what, [ours, theirs], "times", ">=", 1);
      const and4 = (times: string, bandwidths: readonly number[]) =>
        `${times}, with 4: ${spread(bandwidths, "GB/s")}`;
      rows.push({ ...row, ours: and4(row.ours, oursWith4), theirs: and4(row.theirs, theirsWith4) });
    }
    for (const { close } of [listsOfNone, listsOfFour]) await close();
  }
  await four.close();
  return rows;
}

/**
 * WRITE to an agent of ours and to a Python agent, whose progress thread polls without a pause:
 * over TCP the receiver takes part.
 */
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
  const request = { operation: "WRITE", localIds, remoteIds } as const;
  const { ours, theirs } = await series(async () => {
    const ms = await oursMs(fixture, { ...request, ...toOurs });
    const otherMs = await timed(() => fixture.agent.transfer({ ...request, ...toPython }).done);
    return { ours: gigabytes(size, ms), theirs: gigabytes(size, otherMs) };
  });
  await toOurs.close();
  await toPython.close();
  const what =
    "WRITE 512 MiB in 64 KiB, scattered, LIBFABRIC, by ours: bandwidth to an agent of ours / to one of Python's";
  return compare(what, [ours, theirs], "GB/s", ">=");
}

/**
 * READ against the kernel's limit: process_vm_readv with one call for each block, as UCX does, and
 * with 512 blocks per call.
 */
export async function limits(fixture: BenchFixture): Promise<Row[]> {
  const rows: Row[] = [];
  const size = 256 * 2 ** 20;
  const { agent, python, target } = fixture;
  for (const { what, block, order, wanted } of LIMITS) {
    const count = size / block;
    const prepared = await lists(fixture, block, count);
    const ids = (seed: number) => (order === "contiguous" ? inOrder(count) : shuffled(count, seed));
    const [localIds, remoteIds] = [ids(1), ids(2)];
    const seeds = order === "contiguous" ? null : [1, 2];
    const readMs = async (vector: number) => {
      const request = { do: "vm_read", pid: target.pid, block, count, seeds, vector };
      return (await python.ask<{ ms: number }>(request)).ms;
    };
    const { ours, single, vectored } = await series(async () => ({
      ours: gigabytes(
        size,
        await timed(
          () => agent.transfer({ operation: "READ", ...prepared, localIds, remoteIds }).done,
        ),
      ),
      single: gigabytes(size, await readMs(1)),
      vectored: gigabytes(size, await readMs(512)),
    }));
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
