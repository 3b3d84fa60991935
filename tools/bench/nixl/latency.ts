import { performance } from "node:perf_hooks";
import { Worker } from "node:worker_threads";
import type { Agent } from "@kv/interface";
import { pythonNixl } from "../python-peer.js";
import { compare, median, percentile, type Row, rowOf, spread } from "../report.js";
import { type BenchFixture, lists, ROUNDS, series } from "./fixture.js";

const PER_ROUND = 120;
const BATCHES = 10;
const BATCH = 32;
const BLOCK = 4096;
const WORKERS = 6;
/** Messages to a new worker that are not measured. */
const WARM_UP = 12;

/**
 * One 4 KiB READ: the time inside the addon (make, post, done, release), and from the call to the
 * settled promise, against Python's calls for the same; and the time from the outcome to the
 * promise.
 */
export async function smallRead(fixture: BenchFixture): Promise<Row[]> {
  const prepared = await lists(fixture, BLOCK, 64);
  const ids = Int32Array.of(7);
  const small = () =>
    fixture.agent.transfer({ operation: "READ", ...prepared, localIds: ids, remoteIds: ids }).done;
  const { inside, whole, theirs, back, message } = await series(async () => {
    const [inside, whole, back]: [number[], number[], number[]] = [[], [], []];
    // Python's progress thread uses most of a core even when idle.
    fixture.python.pause();
    // Several at once, because Python makes them one right after another, with warm caches.
    for (let i = 0; i < BATCHES; i += 1) {
      const results = await Promise.all(Array.from({ length: BATCH }, small));
      for (const { makeMs = Number.NaN, transferMs } of results)
        inside.push((makeMs + transferMs) * 1e3);
    }
    for (let i = 0; i < PER_ROUND; i += 1) {
      const begun = performance.now();
      const { prepareMs = Number.NaN, transferMs } = await small();
      const totalMs = performance.now() - begun;
      whole.push(totalMs * 1e3);
      back.push((totalMs - prepareMs - transferMs) * 1e3);
    }
    const oneWay = await postMessageUs(PER_ROUND);
    fixture.python.resume();
    const request = { do: "small", block: BLOCK, times: PER_ROUND };
    const python = await fixture.python.ask<Record<"make" | "move" | "release", number[]>>(request);
    return {
      inside: median(inside),
      whole: median(whole),
      back: median(back),
      message: median(oneWay),
      theirs: median(python.make) + median(python.move) + median(python.release),
    };
  });
  await prepared.close();
  const addon = "one 4 KiB READ in the addon (make, post to done, release): time / Python's";
  const call = "one 4 KiB READ, from the call to the promise: time / Python's";
  const settled = "promise settled after done / one-way postMessage between workers";
  return [
    compare(addon, [inside, theirs], "us", "<=", 0.55),
    compare(call, [whole, theirs], "us", "<=", 1.5),
    compare(settled, [back, message], "us", "<=", 1),
  ];
}

const QUEUED = 8000;
const FEW_QUEUED = 250;

/**
 * READs of 4 KiB that are all asked for at once: 8,000, and as many in batches of 250. A transfer
 * must not cost more because others wait.
 */
export async function queuedReads(fixture: BenchFixture): Promise<Row[]> {
  const prepared = await lists(fixture, BLOCK, QUEUED);
  const readAll = async (atOnce: number) => {
    const begun = performance.now();
    for (let first = 0; first < QUEUED; first += atOnce) {
      const reads = Array.from({ length: atOnce }, (_, i) => {
        const ids = Int32Array.of(first + i);
        return fixture.agent.transfer({
          operation: "READ",
          ...prepared,
          localIds: ids,
          remoteIds: ids,
        }).done;
      });
      await Promise.all(reads);
    }
    return ((performance.now() - begun) * 1e3) / QUEUED;
  };
  fixture.python.pause();
  const { many, few } = await series(async () => ({
    many: await readAll(QUEUED),
    few: await readAll(FEW_QUEUED),
  }));
  fixture.python.resume();
  await prepared.close();
  const what = `a 4 KiB READ with ${QUEUED} queued / with ${FEW_QUEUED}: time`;
  return [compare(what, [many, few], "us", "<=", 1.2)];
}

/**
 * Half of a round trip to a worker. Uses several workers, because a pair of threads stays where the
 * kernel has placed it: on one core, where a message takes 11 us, or on two, where it takes 50,
 * most of which is to wake a sleeping core.
 */
async function postMessageUs(times: number): Promise<number[]> {
  const halves: number[] = [];
  for (let i = 0; i < WORKERS; i += 1) halves.push(...(await echoesUs(Math.ceil(times / WORKERS))));
  return halves;
}

async function echoesUs(times: number): Promise<number[]> {
  const worker = new Worker(
    "const { parentPort } = require('node:worker_threads'); parentPort.on('message', (m) => parentPort.postMessage(m));",
    { eval: true },
  );
  const echo = () => new Promise((resolve) => worker.once("message", resolve));
  const halves: number[] = [];
  for (let i = -WARM_UP; i < times; i += 1) {
    const answered = echo();
    const begun = performance.now();
    worker.postMessage(i);
    await answered;
    if (i >= 0) halves.push(((performance.now() - begun) * 1e3) / 2);
  }
  await worker.terminate();
  return halves;
}

const NOTES = 400;
const GAP_MS = 4;

/**
 * One-way delays, by the clock that all processes of a host share: between two processes of ours,
 * and between two Python processes with NIXL's progress thread, which is the default.
 */
export async function notifications(fixture: BenchFixture): Promise<Row[]> {
  const { agent, target, python, backend } = fixture;
  const { name, metadata } = await python.ask<{ name: string; metadata: string }>({
    do: "metadata",
  });
  const pythonSender = await pythonNixl(backend);
  await pythonSender.ask({ do: "meet", metadata });
  const heard: Record<"busy" | "idle" | "pythonBusy" | "pythonSleep", number[][]> = {
    busy: [],
    idle: [],
    pythonBusy: [],
    pythonSleep: [],
  };
  for (let round = -1; round < ROUNDS; round += 1) {
    const keep = (delays: number[][], { delaysMs }: { delaysMs: number[] }) =>
      void (round >= 0 && delays.push(delaysMs));
    for (const peer of [python, pythonSender]) peer.pause();
    for (const work of [true, false]) {
      const listening = target.ask<{ delaysMs: number[] }>({ do: "listen", count: NOTES, work });
      await send(agent, target.name);
      keep(work ? heard.busy : heard.idle, await listening);
    }
    for (const peer of [python, pythonSender]) peer.resume();
    for (const sleepMs of [0, 1]) {
      const listening = python.ask<{ delaysMs: number[] }>({ do: "listen", count: NOTES, sleepMs });
      await pythonSender.ask({ do: "say", to: name, count: NOTES, gapMs: GAP_MS });
      keep(sleepMs === 0 ? heard.pythonBusy : heard.pythonSleep, await listening);
    }
  }
  await pythonSender.close();
  const row = (
    what: string,
    ours: number[][],
    of: (delays: readonly number[]) => number,
    wanted?: number,
  ): Row => {
    const mine = ours.map(of);
    const ratios = mine.map((value, i) => {
      const best = Math.min(of(heard.pythonBusy[i] ?? []), of(heard.pythonSleep[i] ?? []));
      return value / best;
    });
    const theirs = `busy ${spread(heard.pythonBusy.map(of), "ms")}; 1 ms ${spread(heard.pythonSleep.map(of), "ms")}`;
    return {
      ...rowOf(what, [spread(mine, "ms"), theirs], median(ratios), "<=", wanted),
      best: Math.min(...mine) / Math.min(...heard.pythonBusy.map(of), ...heard.pythonSleep.map(of)),
      rounds: ROUNDS,
    };
  };
  const p99 = (delays: readonly number[]) => percentile(delays, 0.99);
  return [
    row("notification one way, receiver at work: median / Python's best", heard.busy, median, 0.25),
    row("notification one way, receiver at work: p99 / Python's best", heard.busy, p99, 0.1),
    row("notification one way, idle receiver: median / Python's best", heard.idle, median),
    row("notification one way, idle receiver: p99 / Python's best", heard.idle, p99),
  ];
}

async function send(agent: Agent, to: string): Promise<void> {
  for (let i = 0; i < NOTES; i += 1) {
    await new Promise((resolve) => setTimeout(resolve, GAP_MS));
    await agent.notify(to, Buffer.from(String(process.hrtime.bigint())));
  }
}
