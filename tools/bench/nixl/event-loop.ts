import { execFile } from "node:child_process";
import { monitorEventLoopDelay, performance } from "node:perf_hooks";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { alone, median, percentile, type Row, spread } from "../report.js";
import { type BenchFixture, LENGTH_BYTES, lists, ROUNDS, series, shuffled } from "./fixture.js";

const BLOCK = 65_536;
const HEARTBEATS = 20;
const GAP_MS = 10;
const pause = (ms: number) => new Promise((resolve) => setTimeout(resolve, ms));

/**
 * Event-loop delay in ms during `work`. The histogram measures from one tick of 1 ms to the next,
 * so the tick itself is subtracted.
 */
async function loopDelay(work: () => Promise<unknown>): Promise<{ p99: number; max: number }> {
  const histogram = monitorEventLoopDelay({ resolution: 1 });
  histogram.enable();
  await work();
  histogram.disable();
  return { p99: histogram.percentile(99) / 1e6 - 1, max: histogram.max / 1e6 - 1 };
}

/** The delay of the event loop, and of notifications to the same peer, while 512 MiB move. */
export async function whileMoving(fixture: BenchFixture): Promise<Row[]> {
  const count = LENGTH_BYTES / BLOCK;
  const prepared = await lists(fixture, BLOCK, count);
  const [localIds, remoteIds] = [shuffled(count, 1), shuffled(count, 2)];
  const read = () =>
    fixture.agent.transfer({ operation: "READ", ...prepared, localIds, remoteIds }).done;
  const all: number[] = [];
  const { idle, busy, maxima, worst } = await series(async (round) => {
    let lastedMs = 0;
    const during = await loopDelay(async () => {
      const begun = performance.now();
      await read();
      lastedMs = performance.now() - begun;
    });
    const still = await loopDelay(() => pause(lastedMs));

    let over = false;
    const moving = (async () => {
      while (!over) await read();
    })();
    const request = { do: "listen", count: HEARTBEATS, work: false };
    const listening = fixture.target.ask<{ delaysMs: number[] }>(request);
    for (let i = 0; i < HEARTBEATS; i += 1) {
      await pause(GAP_MS);
      await fixture.agent.notify(fixture.target.name, Buffer.from(String(process.hrtime.bigint())));
    }
    const { delaysMs } = await listening;
    over = true;
    await moving;
    if (round >= 0) all.push(...delaysMs);
    return { idle: still.p99, busy: during.p99, maxima: during.max, worst: Math.max(...delaysMs) };
  });
  await prepared.close();
  const over = median(busy.map((value, i) => value - (idle[i] ?? 0)));
  const p99 = percentile(all, 0.99);
  const most = `maximum ${Math.max(...maxima).toFixed(1)} ms`;
  const loop = "event-loop delay while 512 MiB moves, p99 over idle";
  const heartbeat = `heartbeat to the peer while 512 MiB moves, p99 of ${ROUNDS * HEARTBEATS}; the worst of each round`;
  const still = `idle ${spread(idle, "ms")}`;
  return [
    alone(
      loop,
      `${spread(busy, "ms")}; ${most}`,
      `<= 2 ms (is ${over.toFixed(2)})`,
      over <= 2,
      still,
      ROUNDS,
    ),
    alone(
      heartbeat,
      spread(worst, "ms"),
      `<= 10 ms (is ${p99.toFixed(2)})`,
      p99 <= 10,
      "-",
      ROUNDS,
    ),
  ];
}

/** The share of a core that a process with an idle agent uses, above one without an agent. */
export async function idleAgent(): Promise<Row[]> {
  const file = fileURLToPath(new URL("./idle-process.ts", import.meta.url));
  const share = async (kind: "agent" | "none") => {
    const { stdout } = await promisify(execFile)(process.execPath, ["--import", "tsx", file, kind]);
    return Number(stdout.trim().split("\n").at(-1));
  };
  const { withAgent, without } = await series(async () => ({
    withAgent: await share("agent"),
    without: await share("none"),
  }));
  const over = median(withAgent.map((value, i) => value - (without[i] ?? 0)));
  const [what, none] = ["an agent with nothing outstanding: share of a core", spread(without, "%")];
  const wanted = `<= 1 % (is ${over.toFixed(2)})`;
  return [
    alone(what, spread(withAgent, "%"), wanted, over <= 1, `without an agent ${none}`, ROUNDS),
  ];
}
