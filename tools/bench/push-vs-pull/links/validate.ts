import { readFile } from "node:fs/promises";
import { availableParallelism } from "node:os";
import { HOP, MAIN_THREADS, OTHER_THREADS } from "../processes/document.js";
import { PROCESSES, type ProcessorCosts, perWay, timesOf, WAYS, type Way } from "../ways.js";
import {
  FORWARD_MS_PER_512,
  KV_BYTES_PER_TOKEN,
  nameOf,
  type Point,
  SAMPLE,
  SIMULATED,
} from "../workload.js";
import { openVirtualDeployment, type World } from "./virtual-deployment.js";

/** Written by the part `processes`. */
const MEASURED = new URL("../../../../docs/bench/push-vs-pull.md", import.meta.url);

/** One point as measured between processes and as simulated with this machine's parameters. */
export interface Compared {
  readonly way: Way;
  readonly point: Point;
  readonly realMs: number;
  readonly virtualMs: number;
}

interface MeasuredPoint {
  readonly point: Point;
  readonly ttftMs: Readonly<Record<Way, number>>;
  readonly costs: Readonly<Record<Way, ProcessorCosts>>;
  /** The forward pass and the bytes; for a full prefix hit the time that D needs without P. */
  readonly boundMs: number;
}

/**
 * Simulates the points that docs/bench/push-vs-pull.md has, with what was measured there besides
 * the times of pull and push: the bandwidth in its bounds, the time of a hop, and the processor
 * time of a request in each process.
 */
export async function validate(): Promise<readonly Compared[]> {
  const lines = (await readFile(MEASURED, "utf8")).split("\n");
  const measured = measuredPoints(lines);
  const hopMs = Number.parseFloat(
    lines.find((line) => line.startsWith(HOP))?.slice(HOP.length) ?? "",
  );
  if (Number.isNaN(hopMs))
    throw new Error(
      "docs/bench/push-vs-pull.md has no time of a hop: run the benchmark push-vs-pull",
    );
  const compared: Compared[] = [];
  for (const pool of ["contiguous", "fragmented"] as const) {
    const ofPool = measured.filter(({ point }) => point.pool === pool);
    const long = find(ofPool, ({ point }) => point.inputTokens === 2048);
    const passMs = (FORWARD_MS_PER_512 * long.point.inputTokens) / 512;
    const world: World = {
      linkBytesPerMs: (long.point.inputTokens * KV_BYTES_PER_TOKEN) / (long.boundMs - passMs),
      hopMs,
      // The measured bandwidth has the cost of scattered blocks in it.
      rangeMs: 0,
      forwardMsPer512Tokens: FORWARD_MS_PER_512,
      layers: SIMULATED.layers,
      kvBytesPerToken: KV_BYTES_PER_TOKEN,
      cores: availableParallelism(),
    };
    for (const way of WAYS) {
      const deployment = await openVirtualDeployment(way, pool, world);
      try {
        for (const { point, ttftMs, costs } of ofPool) {
          const virtualMs = await deployment.ttftMs(point, costs[way]);
          compared.push({ way, point, realMs: ttftMs[way], virtualMs });
        }
      } finally {
        await deployment.close();
      }
    }
  }
  return compared;
}

function measuredPoints(lines: readonly string[]): readonly MeasuredPoint[] {
  return SAMPLE.map((point) => {
    const row = lines.find((line) => line.startsWith(`| ${nameOf(point)} |`));
    const [pull, push, layers, boundMs] = (row ?? "").split("|").slice(2, 6).map(Number);
    if (pull === undefined || push === undefined || layers === undefined || boundMs === undefined)
      throw new Error(
        `docs/bench/push-vs-pull.md has no row for ${nameOf(point)}: run the benchmark push-vs-pull`,
      );
    return {
      point,
      ttftMs: { pull, push, "push, layer-wise": layers },
      costs: perWay((way) => costsIn(lines, `${nameOf(point)}, ${way}`)),
      boundMs,
    };
  });
}

function costsIn(lines: readonly string[], name: string): ProcessorCosts {
  const rowOf = (threads: string): readonly number[] => {
    const table = lines.findIndex((line) => line.startsWith(`| ${threads} |`));
    const row = lines.slice(table).find((line) => line.startsWith(`| ${name} |`));
    if (table < 0 || row === undefined)
      throw new Error(
        `docs/bench/push-vs-pull.md has no processor time of ${name}: run the benchmark push-vs-pull`,
      );
    return row.split("|").slice(2).map(Number);
  };
  const [main, beside] = [rowOf(MAIN_THREADS), rowOf(OTHER_THREADS)];
  const from = (first: number) => {
    const of = (cells: readonly number[]) =>
      timesOf((process) => cells[first + PROCESSES.indexOf(process)] ?? 0);
    return { main: of(main), beside: of(beside) };
  };
  return { requestMs: from(0), tokenMs: from(PROCESSES.length) };
}

function find(
  points: readonly MeasuredPoint[],
  is: (one: MeasuredPoint) => boolean,
): MeasuredPoint {
  const found = points.find(is);
  if (found === undefined)
    throw new Error("docs/bench/push-vs-pull.md lacks a point that the parameters come from");
  return found;
}
