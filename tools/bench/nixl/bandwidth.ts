import { existsSync } from "node:fs";
import { availableParallelism } from "node:os";
import { describePlugins, findLibrary } from "@kv/nixl";
import { nodeTarget, pythonNixl } from "../python-peer.js";
import { alone, compare, type Row } from "../report.js";
import {
  type BenchFixture,
  type FixtureOptions,
  LENGTH_BYTES,
  lists,
  openFixture,
  type Place,
  series,
  shuffled,
  timed,
  withoutPython,
} from "./fixture.js";

const BLOCKS = [4, 64, 1024].map((kib) => kib * 1024);
const CASES = [64 * 2 ** 20, LENGTH_BYTES].flatMap((size) =>
  BLOCKS.map((block) => ({ size, block })),
);
const LARGE = CASES.filter(({ size }) => size === LENGTH_BYTES);
/** In a GPU the driver copies block by block: 131,072 blocks would take a second. */
const GPU_CASES = CASES.filter(({ size, block }) => size / block <= 16_384);
/** Goals relative to Python with pages of 4 KiB, by the size of a block. */
const WANTED_OF_OWN_MEMORY: Readonly<Record<number, number>> = {
  4096: 1.5,
  65536: 1.25,
  1048576: 1,
};
interface Comparison {
  readonly where: string;
  readonly cases?: typeof CASES;
  ofPython(block: number): number | undefined;
  /**
   * Between Python's polls of a transfer: the better result counts. Over UCX the post is the copy,
   * so there is nothing to poll.
   */
  readonly pausesMs?: readonly number[];
}

const show = (bytes: number) =>
  bytes >= 2 ** 20 ? `${bytes / 2 ** 20} MiB` : `${bytes / 1024} KiB`;

const gigabytes = (bytes: number, ms: number) => bytes / ms / 1e6;

/** Alternating, with the same target and ids. */
export const bandwidth = (fixture: BenchFixture) =>
  againstPython(fixture, { where: "UCX", ofPython: () => 0.97 });

/**
 * With the memory that each side's users have: of `allocate` here, and pages of 4 KiB for Python,
 * as PyTorch gives them to vLLM. Both targets run this package, so that neither takes a core.
 */
export async function ownMemory(fixture: BenchFixture) {
  fixture.python.pause();
  const [python, pythonTarget] = [await pythonNixl(), nodeTarget()];
  const memory = { do: "open", lengthBytes: LENGTH_BYTES, hugePages: false };
  const { metadata, address } = await pythonTarget.ask<Place>(memory);
  await python.ask({ ...memory, length: LENGTH_BYTES, metadata, address });
  const rows = await againstPython(
    { ...fixture, python },
    {
      where: "UCX, each with its own memory",
      cases: LARGE,
      ofPython: (block) => WANTED_OF_OWN_MEMORY[block],
    },
  );
  await python.close();
  await pythonTarget.close();
  fixture.python.resume();
  return rows;
}

/** Measures with another fixture, where this machine has what it needs. */
const beside =
  (
    what: string,
    wanted: number,
    missing: () => string | undefined | Promise<string | undefined>,
    options: FixtureOptions,
    comparison: Omit<Comparison, "ofPython">,
  ) =>
  async (ucx: BenchFixture): Promise<Row[]> => {
    const why = await missing();
    if (why !== undefined) return [alone(what, "-", `>= ${wanted}`, undefined, why)];
    ucx.python.pause();
    const fixture = await openFixture(ucx.rounds, options);
    try {
      return await againstPython(fixture, { ...comparison, ofPython: () => wanted });
    } finally {
      await fixture.close();
      ucx.python.resume();
    }
  };

/** The provider is tcp where there is no faster one. */
export const libfabric = beside(
  "LIBFABRIC",
  0.95,
  async () => {
    const libraryPath = await findLibrary();
    const [plugin] = await describePlugins({ libraryPath, names: ["LIBFABRIC"] });
    if (plugin?.loads !== true) return plugin?.remedy ?? "NIXL has no such plugin";
  },
  { backend: "LIBFABRIC" },
  // The target and NIXL's own thread need a core meanwhile.
  { where: "LIBFABRIC", pausesMs: [0, 1] },
);

export const gpu = beside(
  "READ and WRITE, memory of a GPU",
  0.97,
  () => (existsSync("/dev/nvidia0") ? undefined : "no GPU here: there is no /dev/nvidia0"),
  { memoryType: "VRAM" },
  { where: "UCX, memory of a GPU", cases: GPU_CASES },
);

export const threads = beside(
  "num_threads",
  1,
  () => {
    const cores = availableParallelism();
    return cores < 8 ? `8 cores are needed, here are ${cores}` : undefined;
  },
  { numThreads: 4 },
  { where: "UCX, num_threads 4", cases: LARGE },
);

async function againstPython(
  fixture: BenchFixture,
  { where, cases = CASES, ofPython, pausesMs = [0] }: Comparison,
) {
  const { python, rounds } = fixture;
  const rows: Row[] = [];
  for (const { size, block } of cases) {
    const count = size / block;
    const { move, close } = await lists(fixture, block, count);
    const [localIds, remoteIds] = [shuffled(count, 1), shuffled(count, 2)];
    for (const operation of ["READ", "WRITE"] as const) {
      const mine = () =>
        withoutPython(python, () => timed(() => move(operation, localIds, remoteIds)));
      const pythons = async () => {
        const times: number[] = [];
        for (const pauseMs of pausesMs) {
          const request = { do: "move", operation, block, count, seeds: [1, 2], pauseMs };
          times.push((await python.ask<{ ms: number }>(request)).ms);
        }
        return Math.min(...times);
      };
      const { ours, theirs } = await series(rounds, async (round) => {
        // The sides take turns at going first, because the second one finds warm caches.
        const first = round % 2 === 0 ? await mine() : undefined;
        const ms = await pythons();
        return { ours: gigabytes(size, first ?? (await mine())), theirs: gigabytes(size, ms) };
      });
      const what = `${operation} ${show(size)} in ${show(block)}, scattered, ${where}: bandwidth / Python's`;
      rows.push(compare(what, [ours, theirs], "GB/s", ">=", ofPython(block)));
    }
    await close();
  }
  return rows;
}
