import { loadavg } from "node:os";
import { alone, median, type Row, rowOf, spread } from "../../report.js";
import {
  gainOf,
  type Measured,
  type ProcessorCosts,
  type ProcessTimes,
  perWay,
  type ThreadTimes,
  timesOf,
  WAYS,
  type Way,
} from "../ways.js";
import {
  cachedTokens,
  FORWARD_MS_PER_512,
  KV_BYTES_PER_TOKEN,
  nameOf,
  type Point,
  SAMPLE,
} from "../workload.js";
import { openBandwidth } from "./bandwidth.js";
import { type Deployment, openDeployment, type PointRun } from "./deployments.js";
import { document } from "./document.js";
import { hopMs } from "./hop.js";
import { plot } from "./plot.js";

const ROUNDS = Math.max(3, Number(process.env["KV_BENCH_ROUNDS"] ?? 5));
/** Tokens of the shorter output, by which the costs of a request and of a token are told apart. */
const SHORT_OUTPUT = 2;

/** Measures all points with each way. `publish` writes a file of docs/bench. */
export async function measureProcesses(
  publish: (name: string, text: string) => Promise<void>,
): Promise<readonly Row[]> {
  const loadBefore = loadavg()[0] ?? 0;
  const measured: Measured[] = [];
  let failed = 0;
  const hop = await hopMs();
  const bandwidth = await openBandwidth();
  try {
    for (const pool of ["contiguous", "fragmented"] as const) {
      const deployments = new Map<Way, Deployment>();
      try {
        for (const way of WAYS) deployments.set(way, await openDeployment(way, pool));
        for (const point of SAMPLE.filter((each) => each.pool === pool)) {
          process.stderr.write(`  ${nameOf(point)}\n`);
          const missing = point.hitPercent === 100 ? 0 : point.inputTokens - cachedTokens(point);
          const transferMs =
            missing === 0 ? 0 : await bandwidth.transferMs(missing * KV_BYTES_PER_TOKEN, pool);
          measured.push(await measure(point, deployments, transferMs));
        }
      } finally {
        for (const deployment of deployments.values()) {
          failed += deployment.failed;
          await deployment.close();
        }
      }
      // Written after each pool, so that a later failure loses nothing.
      const load = { before: loadBefore, after: loadavg()[0] ?? 0 };
      await publish("push-vs-pull.svg", plot(measured));
      await publish(
        "push-vs-pull.md",
        document(measured, { rounds: ROUNDS, load, failed, hopMs: hop }),
      );
    }
  } finally {
    await bandwidth.close();
  }
  return rowsOf(measured);
}

async function measure(
  point: Point,
  deployments: ReadonlyMap<Way, Deployment>,
  transferMs: number,
): Promise<Measured> {
  const runs = perWay((): PointRun[] => []);
  const shortRuns = perWay((): PointRun[] => []);
  const local: number[] = [];
  for (let round = 0; round < ROUNDS; round++) {
    // In turn, starting with another way in each round.
    for (let i = 0; i < WAYS.length; i++) {
      const way = WAYS[(round + i) % WAYS.length] as Way;
      const deployment = deployments.get(way);
      if (deployment === undefined) continue;
      runs[way].push(await deployment.run(point));
      shortRuns[way].push(await deployment.run({ ...point, outputTokens: SHORT_OUTPUT }));
    }
    if (point.hitPercent === 100)
      local.push((await deployments.get("pull")?.localTtftMs(point.inputTokens)) ?? Number.NaN);
  }
  const roundsMs = perWay((way) => runs[way].map((run) => run.ttftMs));
  const ttftMs = perWay((way) => median(roundsMs[way]));
  const costs = perWay((way) => costsOf(runs[way], shortRuns[way], point.outputTokens));
  const passMs = (FORWARD_MS_PER_512 * point.inputTokens) / 512;
  // P computes one prompt at a time, so the median of n requests waits for half of them.
  const passes = (point.atOnce + 1) / 2;
  const boundMs = point.hitPercent === 100 ? 0 : passMs * passes + transferMs;
  return {
    point,
    roundsMs,
    ttftMs,
    costs,
    boundMs,
    localMs: local.length === 0 ? undefined : median(local),
  };
}

/** A token's cost is the difference between long and short outputs. */
function costsOf(
  runs: readonly PointRun[],
  shortRuns: readonly PointRun[],
  outputTokens: number,
): ProcessorCosts {
  const costs = (threads: keyof ThreadTimes) => {
    const of = (some: readonly PointRun[], name: keyof ProcessTimes) =>
      median(some.map(({ processorMs }) => processorMs[threads][name]));
    const tokenMs = timesOf((name) =>
      Math.max(0, (of(runs, name) - of(shortRuns, name)) / (outputTokens - SHORT_OUTPUT)),
    );
    const requestMs = timesOf((name) => of(shortRuns, name) - tokenMs[name] * (SHORT_OUTPUT - 1));
    return { requestMs, tokenMs };
  };
  const [main, beside] = [costs("main"), costs("beside")];
  return {
    requestMs: { main: main.requestMs, beside: beside.requestMs },
    tokenMs: { main: main.tokenMs, beside: beside.tokenMs },
  };
}

function rowsOf(measured: readonly Measured[]): Row[] {
  return measured.flatMap((each): Row[] => {
    const { point, roundsMs, ttftMs, boundMs, localMs } = each;
    const what = nameOf(point);
    const ways = (["push", "push, layer-wise"] as const).map((way) => {
      const wanted = point.atOnce === 16 && way === "push" ? 1.2 : undefined;
      const shown = [spread(roundsMs[way], "ms"), spread(roundsMs.pull, "ms")] as const;
      return rowOf(`TTFT ${what}: pull / ${way}`, shown, gainOf(each, way), ">=", wanted);
    });
    if (point.atOnce !== 1) return ways;
    const floor = localMs ?? boundMs;
    const over = (["pull", "push"] as const).map((way): Row => {
      const overMs = ttftMs[way] - floor;
      const name = `${what}: ${way} over ${localMs === undefined ? "the bound" : "a local hit"}`;
      return alone(
        name,
        `${overMs.toFixed(1)} ms`,
        "<= 3 ms",
        overMs <= 3,
        `${floor.toFixed(1)} ms`,
      );
    });
    return [...ways, ...over];
  });
}
