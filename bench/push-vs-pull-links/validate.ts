import { readFile } from "node:fs/promises";
import { availableParallelism } from "node:os";
import { WAYS, type Way } from "../push-vs-pull/deployments.js";
import {
  FORWARD_MS_PER_512,
  KV_BYTES_PER_TOKEN,
  nameOf,
  type Point,
  SAMPLE,
  SIMULATED,
} from "../push-vs-pull/workload.js";
import { openVirtualDeployment, type World } from "./virtual-deployment.js";

/** Written by `npm run bench -- push-vs-pull`. */
const MEASURED = new URL("../../docs/bench/push-vs-pull.md", import.meta.url);

/** One point as measured between processes and as simulated with this machine's parameters. */
export interface Compared {
  readonly way: Way;
  readonly point: Point;
  readonly realMs: number;
  readonly virtualMs: number;
}

export interface Validation {
  readonly compared: readonly Compared[];
  /** What a message costs: half of the time that D takes to answer a prompt of which it has all. */
  readonly messageMs: number;
}

interface MeasuredPoint {
  readonly point: Point;
  readonly ttftMs: Readonly<Record<Way, number>>;
  /** The forward pass and the bytes; for a full prefix hit the time that D needs without P. */
  readonly boundMs: number;
}

/**
 * Simulates the points that docs/bench/push-vs-pull.md has, with the parameters of the machine that they were measured on: the bandwidth that is in its
 * bounds, and the cost of a message from its full prefix hit. Neither is fitted to the times of pull and push.
 */
export async function validate(): Promise<Validation> {
  const measured = await measuredPoints();
  const localMs = find(measured, ({ point }) => point.hitPercent === 100).boundMs;
  const messageMs = localMs / 2;
  const compared: Compared[] = [];
  for (const pool of ["contiguous", "fragmented"] as const) {
    const ofPool = measured.filter(({ point }) => point.pool === pool);
    const long = find(ofPool, ({ point }) => point.inputTokens === 2048);
    const passMs = (FORWARD_MS_PER_512 * long.point.inputTokens) / 512;
    const world: World = {
      linkBytesPerMs: (long.point.inputTokens * KV_BYTES_PER_TOKEN) / (long.boundMs - passMs),
      hopMs: 0,
      // The measured bandwidth has the cost of scattered blocks in it.
      rangeMs: 0,
      forwardMsPer512Tokens: FORWARD_MS_PER_512,
      layers: SIMULATED.layers,
      kvBytesPerToken: KV_BYTES_PER_TOKEN,
      handlingMs: messageMs,
      cores: availableParallelism(),
    };
    for (const way of WAYS) {
      const deployment = await openVirtualDeployment(way, pool, world);
      try {
        for (const { point, ttftMs } of ofPool)
          compared.push({ way, point, realMs: ttftMs[way], virtualMs: await deployment.ttftMs(point) });
      } finally {
        await deployment.close();
      }
    }
  }
  return { compared, messageMs };
}

async function measuredPoints(): Promise<readonly MeasuredPoint[]> {
  const lines = (await readFile(MEASURED, "utf8")).split("\n");
  return SAMPLE.map((point) => {
    const row = lines.find((line) => line.startsWith(`| ${nameOf(point)} |`));
    const [pull, push, layers, boundMs] = (row ?? "").split("|").slice(2, 6).map(Number);
    if (pull === undefined || push === undefined || layers === undefined || boundMs === undefined)
      throw new Error(
        `docs/bench/push-vs-pull.md has no row for ${nameOf(point)}: run the benchmark push-vs-pull`,
      );
    return { point, ttftMs: { pull, push, "push, layer-wise": layers }, boundMs };
  });
}

function find(points: readonly MeasuredPoint[], is: (one: MeasuredPoint) => boolean): MeasuredPoint {
  const found = points.find(is);
  if (found === undefined)
    throw new Error("docs/bench/push-vs-pull.md lacks a point that the parameters come from");
  return found;
}
