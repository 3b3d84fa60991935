import { availableParallelism } from "node:os";
import { openBandwidth } from "../push-vs-pull/bandwidth.js";
import { type Deployment, openDeployment, WAYS, type Way } from "../push-vs-pull/deployments.js";
import { FORWARD_MS_PER_512, KV_BYTES_PER_TOKEN, type Point, SIMULATED } from "../push-vs-pull/workload.js";
import { median } from "../report.js";
import { openVirtualDeployment, type World } from "./virtual-deployment.js";

const ROUNDS = Math.max(3, Number(process.env["KV_BENCH_ROUNDS"] ?? 7));

const base: Point = { inputTokens: 1024, outputTokens: 4, atOnce: 1, hitPercent: 0, pool: "contiguous" };
const POINTS: readonly Point[] = [
  ...[128, 512, 1024, 2048].map((inputTokens) => ({ ...base, inputTokens })),
  ...([50, 100] as const).map((hitPercent) => ({ ...base, hitPercent })),
  { ...base, atOnce: 4 },
  { ...base, atOnce: 16 },
  ...[512, 2048].map((inputTokens) => ({ ...base, inputTokens, pool: "fragmented" as const })),
];

/** One point as measured between processes and as simulated with this machine's parameters. */
export interface Compared {
  readonly way: Way;
  readonly point: Point;
  readonly realMs: number;
  readonly virtualMs: number;
}

export interface Validation {
  readonly compared: readonly Compared[];
  /** What a message costs here: half of the time that D takes to answer a prompt of which it has all. */
  readonly messageMs: number;
}

/**
 * Measures points between real processes over NIXL, and simulates them with this machine's parameters: its bandwidth, and the cost of a message from
 * requests that go to D alone. Neither is fitted to the points.
 */
export async function validate(): Promise<Validation> {
  const compared: Compared[] = [];
  const bandwidth = await openBandwidth();
  const messages: number[] = [];
  try {
    for (const pool of ["contiguous", "fragmented"] as const) {
      const points = POINTS.filter((point) => point.pool === pool);
      const real = await measure(pool, points, messages);
      const bytes = 2048 * KV_BYTES_PER_TOKEN;
      const world: World = {
        linkBytesPerMs: bytes / (await bandwidth.transferMs(bytes, pool)),
        hopMs: 0,
        // The measured bandwidth has the cost of scattered blocks in it.
        rangeMs: 0,
        forwardMsPer512Tokens: FORWARD_MS_PER_512,
        layers: SIMULATED.layers,
        kvBytesPerToken: KV_BYTES_PER_TOKEN,
        handlingMs: median(messages),
        cores: availableParallelism(),
      };
      for (const way of WAYS) {
        const deployment = await openVirtualDeployment(way, pool, world);
        for (const point of points) {
          const realMs = median(real.get(way)?.get(point) ?? []);
          compared.push({ way, point, realMs, virtualMs: await deployment.ttftMs(point) });
        }
        await deployment.close();
      }
    }
  } finally {
    await bandwidth.close();
  }
  return { compared, messageMs: median(messages) };
}

/** TTFT of each point and way, in turn, between real processes. Adds what messages took to `messages`. */
async function measure(
  pool: Point["pool"],
  points: readonly Point[],
  messages: number[],
): Promise<ReadonlyMap<Way, ReadonlyMap<Point, readonly number[]>>> {
  const deployments = new Map<Way, Deployment>();
  const times = new Map(WAYS.map((way) => [way, new Map(points.map((point) => [point, [] as number[]]))]));
  try {
    for (const way of WAYS) deployments.set(way, await openDeployment(way, pool));
    for (const point of points) {
      process.stderr.write(`  real: ${point.inputTokens} tokens, ${point.atOnce} at once, ${pool}\n`);
      for (let round = 0; round < ROUNDS; round++) {
        for (let i = 0; i < WAYS.length; i++) {
          const way = WAYS[(round + i) % WAYS.length] as Way;
          const deployment = deployments.get(way);
          if (deployment === undefined) continue;
          times
            .get(way)
            ?.get(point)
            ?.push(await deployment.ttftMs(point));
        }
        // The client's message to D, and D's to the client.
        const localMs = await deployments.get("pull")?.localTtftMs(128);
        if (localMs !== undefined) messages.push(localMs / 2);
      }
    }
  } finally {
    for (const deployment of deployments.values()) await deployment.close();
  }
  return times;
}
