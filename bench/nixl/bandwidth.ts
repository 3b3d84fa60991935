import { performance } from "node:perf_hooks";
import { describePlugins, findLibrary } from "@kv/nixl";
import { bestRatio, pairRatio, type Row, spread } from "../report.js";
import { inOrder, lists, openStage, type Place, ROUNDS, type Stage, shuffled } from "./stage.js";

const SIZES = [64 * 2 ** 20, 512 * 2 ** 20];
const BLOCKS = [4, 64, 1024].map((kib) => kib * 1024);
/**
 * Of Python's, and how long Python sleeps between two looks at a transfer, in ms. A post over UCX is the copy: there is nothing to wait for. Over LIBFABRIC the
 * target and NIXL's own thread want a core meanwhile, which looking without a pause takes from them: Python counts with the better of both.
 */
const WANTED = {
  UCX: { ofPython: 0.97, pausesMs: [0] },
  LIBFABRIC: { ofPython: 0.95, pausesMs: [0, 1] },
} as const;
/** Of process_vm_readv, which UCX copies by on one host. */
const LIMITS = [
  { what: "contiguous", block: 2 ** 20, order: "contiguous", wanted: 0.9 },
  { what: "scattered 64 KiB", block: 65_536, order: "scattered", wanted: 0.6 },
  { what: "scattered 4 KiB", block: 4096, order: "scattered", wanted: undefined },
] as const;

const show = (bytes: number) => (bytes >= 2 ** 20 ? `${bytes / 2 ** 20} MiB` : `${bytes / 1024} KiB`);

/** READ and WRITE over UCX against Python NIXL, in turn, on the same target and ids. */
export const bandwidth = (stage: Stage): Promise<Row[]> => againstPython(stage, "UCX");

/** The same over LIBFABRIC: over tcp where there is no faster provider. */
export async function libfabric(ucx: Stage): Promise<Row[]> {
  const [plugin] = await describePlugins({ libraryPath: await findLibrary(), names: ["LIBFABRIC"] });
  if (plugin?.loads !== true) {
    const theirs = plugin?.remedy ?? "NIXL has no such plugin";
    return [{ what: "LIBFABRIC", ours: "-", theirs, ratio: undefined, wanted: ">= 0.95", met: undefined }];
  }
  ucx.python.pause();
  const stage = await openStage("LIBFABRIC");
  try {
    return [...(await againstPython(stage, "LIBFABRIC")), await writtenTo(stage)];
  } finally {
    await stage.close();
    ucx.python.resume();
  }
}

async function againstPython(stage: Stage, backend: keyof typeof WANTED): Promise<Row[]> {
  const { ofPython, pausesMs } = WANTED[backend];
  const rows: Row[] = [];
  for (const size of SIZES) {
    for (const block of BLOCKS) {
      const count = size / block;
      const prepared = await lists(stage, block, count);
      const [localIds, remoteIds] = [shuffled(count, 1), shuffled(count, 2)];
      for (const operation of ["READ", "WRITE"] as const) {
        const ours: number[] = [];
        const theirs: number[] = [];
        const mine = async () => {
          // Its progress thread takes most of a core also while it does nothing.
          stage.python.pause();
          const ms = await timed(
            () => stage.agent.transfer({ operation, ...prepared, localIds, remoteIds }).done,
          );
          stage.python.resume();
          return ms;
        };
        const python = async () => {
          let best = Number.POSITIVE_INFINITY;
          for (const pauseMs of pausesMs) {
            const command = { do: "move", operation, block, count, seeds: [1, 2], pauseMs };
            best = Math.min(best, (await stage.python.ask<{ ms: number }>(command)).ms);
          }
          return best;
        };
        for (let round = -1; round < ROUNDS; round += 1) {
          // By turns who goes first: what one leaves in the caches the other finds there.
          const first = round % 2 === 0 ? await mine() : Number.NaN;
          const ms = await python();
          const mineMs = Number.isNaN(first) ? await mine() : first;
          if (round < 0) continue;
          ours.push(size / mineMs / 1e6);
          theirs.push(size / ms / 1e6);
        }
        const ratio = pairRatio(ours, theirs);
        rows.push({
          what: `${operation} ${show(size)} in ${show(block)}, scattered, ${backend}: bandwidth / Python's`,
          ours: spread(ours, "GB/s"),
          theirs: spread(theirs, "GB/s"),
          ratio,
          best: bestRatio(ours, theirs, "most"),
          wanted: `>= ${ofPython}`,
          met: ratio >= ofPython,
        });
      }
      await prepared.close();
    }
  }
  return rows;
}

/** WRITE to an agent of ours and to one of Python's, whose progress thread looks all the time: over tcp the one that is written to must take part. */
async function writtenTo(stage: Stage): Promise<Row> {
  const [size, block] = [512 * 2 ** 20, 65_536];
  const count = size / block;
  const python = await stage.python.ask<Place & { metadata: string }>({ do: "metadata" });
  await stage.agent.addRemote(Buffer.from(python.metadata, "hex"));
  const [toOurs, toPython] = [
    await lists(stage, block, count),
    await lists({ ...stage, target: python }, block, count),
  ];
  const [localIds, remoteIds] = [shuffled(count, 1), shuffled(count, 2)];
  const write = (prepared: typeof toOurs) =>
    timed(() => stage.agent.transfer({ operation: "WRITE", ...prepared, localIds, remoteIds }).done);
  const ours: number[] = [];
  const theirs: number[] = [];
  for (let round = -1; round < ROUNDS; round += 1) {
    stage.python.pause();
    const mineMs = await write(toOurs);
    stage.python.resume();
    const pythonMs = await write(toPython);
    if (round < 0) continue;
    ours.push(size / mineMs / 1e6);
    theirs.push(size / pythonMs / 1e6);
  }
  await toOurs.close();
  await toPython.close();
  return {
    what: "WRITE 512 MiB in 64 KiB, scattered, LIBFABRIC, by ours: bandwidth to an agent of ours / to one of Python's",
    ours: spread(ours, "GB/s"),
    theirs: spread(theirs, "GB/s"),
    ratio: pairRatio(ours, theirs),
    best: bestRatio(ours, theirs, "most"),
    wanted: "reported",
    met: undefined,
  };
}

/** READ against what the kernel gives: process_vm_readv, one call a block as UCX does, and 512 blocks a call as it might. */
export async function limits(stage: Stage): Promise<Row[]> {
  const rows: Row[] = [];
  const size = 256 * 2 ** 20;
  for (const { what, block, order, wanted } of LIMITS) {
    const count = size / block;
    const prepared = await lists(stage, block, count);
    const ids = (seed: number) => (order === "contiguous" ? inOrder(count) : shuffled(count, seed));
    const [localIds, remoteIds] = [ids(1), ids(2)];
    const ours: number[] = [];
    const single: number[] = [];
    const vectored: number[] = [];
    const request = {
      do: "vm_read",
      pid: stage.target.pid,
      block,
      count,
      seeds: order === "contiguous" ? null : [1, 2],
    };
    for (let round = -1; round < ROUNDS; round += 1) {
      const mine = await timed(
        () => stage.agent.transfer({ operation: "READ", ...prepared, localIds, remoteIds }).done,
      );
      const one = await stage.python.ask<{ ms: number }>({ ...request, vector: 1 });
      const many = await stage.python.ask<{ ms: number }>({ ...request, vector: 512 });
      if (round < 0) continue;
      ours.push(size / mine / 1e6);
      single.push(size / one.ms / 1e6);
      vectored.push(size / many.ms / 1e6);
    }
    const ratio = pairRatio(ours, single);
    rows.push({
      what: `READ 256 MiB ${what}: bandwidth / process_vm_readv, a call for each block`,
      ours: spread(ours, "GB/s"),
      theirs: spread(single, "GB/s"),
      ratio,
      best: bestRatio(ours, single, "most"),
      wanted: wanted === undefined ? "reported" : `>= ${wanted}`,
      met: wanted === undefined ? undefined : ratio >= wanted,
    });
    await prepared.close();
    if (order === "contiguous") continue;
    rows.push({
      what: `a way round UCX, ${what}: process_vm_readv of 512 blocks a call / READ`,
      ours: spread(vectored, "GB/s"),
      theirs: `READ ${spread(ours, "GB/s")}`,
      ratio: pairRatio(vectored, ours),
      best: bestRatio(vectored, ours, "most"),
      wanted: "reported",
      met: undefined,
    });
  }
  return rows;
}

async function timed(work: () => Promise<unknown>): Promise<number> {
  const begun = performance.now();
  await work();
  return performance.now() - begun;
}
