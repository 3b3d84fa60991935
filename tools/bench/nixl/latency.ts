import { monitorEventLoopDelay, performance } from "node:perf_hooks";
import { setTimeout as pause } from "node:timers/promises";
import { Worker } from "node:worker_threads";
import { pythonNixl } from "../python-peer.js";
import { alone, compare, median, percentile, type Row, spread } from "../report.js";
import {
  type BenchFixture,
  LENGTH_BYTES,
  lists,
  type Place,
  series,
  shuffled,
  timed,
  withoutPython,
} from "./fixture.js";

const PER_ROUND = 120;
const BATCHES = 10;
const BATCH = 32;
const BLOCK = 4096;
const WORKERS = 6;
const WARM_UP = 12;

/**
 * The time inside the addon, and from the call to the settled promise, against Python's calls for
 * the same; and from the outcome to the promise.
 */
export async function smallRead(fixture: BenchFixture) {
  const { move, close } = await lists(fixture, BLOCK, 64);
  const small = () => move("READ", Int32Array.of(7));
  const ours = async () => {
    const [inside, whole, back]: [number[], number[], number[]] = [[], [], []];
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
    const message = await postMessageUs();
    return { inside: median(inside), whole: median(whole), back: median(back), message };
  };
  const { inside, whole, theirs, back, message } = await series(fixture.rounds, async () => {
    const own = await withoutPython(fixture.python, ours);
    const request = { do: "small", block: BLOCK, times: PER_ROUND };
    const python = await fixture.python.ask<Record<"make" | "move" | "release", number[]>>(request);
    return { ...own, theirs: median(python.make) + median(python.move) + median(python.release) };
  });
  await close();
  const addon = "one 4 KiB READ in the addon (make, post to done, release): time / Python's";
  const call = "one 4 KiB READ, from the call to the promise: time / Python's";
  const settled = "promise settled after done / one-way postMessage between workers";
  return [
    compare(addon, [inside, theirs], "us", "<=", 0.55),
    compare(call, [whole, theirs], "us", "<=", 1.5),
    compare(settled, [back, message], "us", "<=", 1),
  ];
}

/**
 * Half of a round trip. A pair of threads stays where the kernel has placed it, on one core (11 us)
 * or on two (50): so several workers.
 */
async function postMessageUs(): Promise<number> {
  const halves: number[] = [];
  for (let at = 0; at < WORKERS; at += 1) {
    const worker = new Worker(
      "const { parentPort } = require('node:worker_threads'); parentPort.on('message', (m) => parentPort.postMessage(m));",
      { eval: true },
    );
    for (let i = -WARM_UP; i < PER_ROUND / WORKERS; i += 1) {
      const answered = new Promise((resolve) => worker.once("message", resolve));
      const begun = performance.now();
      worker.postMessage(i);
      await answered;
      if (i >= 0) halves.push(((performance.now() - begun) * 1e3) / 2);
    }
    await worker.terminate();
  }
  return median(halves);
}

const NOTES = 400;
const NOTE_GAP_MS = 4;
const QUIET = { listen: NOTES, gapMs: NOTE_GAP_MS } as const;

async function notified(
  { agent, target }: BenchFixture,
  { listen, gapMs }: { readonly listen: number; readonly gapMs: number },
  work: boolean,
): Promise<number[]> {
  const listening = target.ask<{ delaysMs: number[] }>({ do: "listen", count: listen, work });
  for (let i = 0; i < listen; i += 1) {
    await pause(gapMs);
    await agent.notify(target.name, Buffer.from(String(process.hrtime.bigint())));
  }
  return (await listening).delaysMs;
}

/**
 * By the clock that all processes of a host share: between two of ours, and between two of Python
 * with NIXL's progress thread, which is the default.
 */
export async function notifications(fixture: BenchFixture) {
  const { python, backend, rounds } = fixture;
  const { name, metadata } = await python.ask<Place>({ do: "metadata" });
  const sender = await pythonNixl(backend);
  await sender.ask({ do: "meet", metadata });
  const between = async (sleepMs: number) => {
    const listening = python.ask<{ delaysMs: number[] }>({ do: "listen", count: NOTES, sleepMs });
    await sender.ask({ do: "say", to: name, count: NOTES, gapMs: NOTE_GAP_MS });
    return (await listening).delaysMs;
  };
  const heard = await series(rounds, async () => {
    const [busy, idle] = await withoutPython(sender, () =>
      withoutPython(python, async () => [
        await notified(fixture, QUIET, true),
        await notified(fixture, QUIET, false),
      ]),
    );
    const [polling, napping] = [await between(0), await between(1)];
    const delays = Object.entries({ busy, idle, polling, napping });
    const figures = delays.flatMap(([who, of = []]) => [
      [`${who} median`, median(of)],
      [`${who} p99`, percentile(of, 0.99)],
    ]);
    return Object.fromEntries(figures) as Record<string, number>;
  });
  await sender.close();

  const row = (what: string, who: string, figure: "median" | "p99", wanted?: number): Row => {
    const of = (whose: string) => heard[`${whose} ${figure}`] ?? [];
    const [polling, napping] = [of("polling"), of("napping")];
    const best = polling.map((value, i) => Math.min(value, napping[i] ?? Number.NaN));
    const name = `notification one way, ${what}: ${figure} / Python's best`;
    const compared = compare(name, [of(who), best], "ms", "<=", wanted);
    return { ...compared, theirs: `busy ${spread(polling, "ms")}; 1 ms ${spread(napping, "ms")}` };
  };
  return [
    row("receiver at work", "busy", "median", 0.25),
    row("receiver at work", "busy", "p99", 0.1),
    row("idle receiver", "idle", "median"),
    row("idle receiver", "idle", "p99"),
  ];
}

const MOVED_BLOCK = 65_536;
const HEARTBEATS = { listen: 20, gapMs: 10 } as const;

/** The histogram measures from one tick of 1 ms to the next, so the tick is subtracted. */
async function loopDelay(work: () => Promise<unknown>): Promise<{ p99: number; max: number }> {
  const histogram = monitorEventLoopDelay({ resolution: 1 });
  histogram.enable();
  await work();
  histogram.disable();
  return { p99: histogram.percentile(99) / 1e6 - 1, max: histogram.max / 1e6 - 1 };
}

/** The delay of the event loop, and of notifications to the same peer, while 512 MiB move. */
export async function whileMoving(fixture: BenchFixture) {
  const count = LENGTH_BYTES / MOVED_BLOCK;
  const { move, close } = await lists(fixture, MOVED_BLOCK, count);
  const [localIds, remoteIds] = [shuffled(count, 1), shuffled(count, 2)];
  const read = () => move("READ", localIds, remoteIds);
  const all: number[] = [];
  const { idle, busy, maxima, worst } = await series(fixture.rounds, async (round) => {
    let lastedMs = 0;
    const during = await loopDelay(async () => {
      lastedMs = await timed(read);
    });
    const still = await loopDelay(() => pause(lastedMs));
    let isOver = false;
    const moving = (async () => {
      while (!isOver) await read();
    })();
    const delaysMs = await notified(fixture, HEARTBEATS, false);
    isOver = true;
    await moving;
    if (round >= 0) all.push(...delaysMs);
    return { idle: still.p99, busy: during.p99, maxima: during.max, worst: Math.max(...delaysMs) };
  });
  await close();
  const over = median(busy.map((value, i) => value - (idle[i] ?? 0)));
  const p99 = percentile(all, 0.99);
  const loop = "event-loop delay while 512 MiB moves, p99 over idle";
  const shown = `${spread(busy, "ms")}; maximum ${Math.max(...maxima).toFixed(1)} ms`;
  const wanted = `<= 2 ms (is ${over.toFixed(2)})`;
  const heartbeat = `heartbeat to the peer while 512 MiB moves, p99 of ${all.length}; the worst of each round`;
  const wantedP99 = `<= 10 ms (is ${p99.toFixed(2)})`;
  const { rounds } = fixture;
  return [
    alone(loop, shown, wanted, over <= 2, `idle ${spread(idle, "ms")}`, rounds),
    alone(heartbeat, spread(worst, "ms"), wantedP99, p99 <= 10, "-", rounds),
  ];
}
