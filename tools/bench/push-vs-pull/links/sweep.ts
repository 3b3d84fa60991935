import { WAYS, type Way } from "../ways.js";
import type { Point } from "../workload.js";
import { openVirtualDeployment, type World } from "./virtual-deployment.js";

/**
 * A model of 8 billion parameters in bfloat16 (32 layers, 8 KV heads of 128) on one GPU that
 * computes 20,000 prompt tokens a second.
 */
export const MODEL = { forwardMsPer512Tokens: 25.6, layers: 32, kvBytesPerToken: 131_072 } as const;
/** A network adapter handles about five million work requests a second. */
const RANGE_MS = 0.0002;

export const LINKS_GBITS = [25, 100, 400] as const;
export const HOPS_MS = [0.05, 0.1, 0.25, 0.5] as const;
export const AT_ONCE = [1, 4, 16, 64] as const;

/** One point of the sweep, with TTFT in ms of each way. */
export interface Swept {
  readonly linkGbits: number;
  readonly hopMs: number;
  readonly point: Point;
  readonly hitsAt: "prefill" | "decode";
  readonly ttftMs: Readonly<Record<Way, number>>;
}

interface Case {
  readonly hitsAt: "prefill" | "decode";
  readonly pool: Point["pool"];
  readonly points: readonly Point[];
}

const base: Point = {
  inputTokens: 1024,
  outputTokens: 4,
  atOnce: 1,
  hitPercent: 0,
  pool: "contiguous",
};
const hits = [50, 100] as const;
/** The points of each link and hop. */
const CASES: readonly Case[] = [
  {
    hitsAt: "decode",
    pool: "contiguous",
    points: [
      ...AT_ONCE.map((atOnce) => ({ ...base, atOnce })),
      ...[128, 4096].map((inputTokens) => ({ ...base, inputTokens })),
      ...hits.flatMap((hitPercent) => [1, 16].map((atOnce) => ({ ...base, hitPercent, atOnce }))),
    ],
  },
  {
    hitsAt: "prefill",
    pool: "contiguous",
    points: hits.flatMap((hitPercent) =>
      [1, 16].map((atOnce) => ({ ...base, hitPercent, atOnce })),
    ),
  },
  {
    hitsAt: "decode",
    pool: "fragmented",
    points: [1, 16].map((atOnce) => ({ ...base, pool: "fragmented", atOnce })),
  },
];

export function worldOf(linkGbits: number, hopMs: number): World {
  return { ...MODEL, linkBytesPerMs: (linkGbits * 1e9) / 8 / 1000, hopMs, rangeMs: RANGE_MS };
}

/** Runs every case on every link and hop, in virtual time. */
export async function sweep(): Promise<readonly Swept[]> {
  const found: Swept[] = [];
  for (const linkGbits of LINKS_GBITS) {
    for (const hopMs of HOPS_MS) {
      process.stderr.write(`  ${linkGbits} Gb/s, ${hopMs} ms\n`);
      for (const { hitsAt, pool, points } of CASES)
        found.push(...(await sweepCase({ linkGbits, hopMs, hitsAt, pool, points })));
    }
  }
  return found;
}

/** Measures the points of one case with each way. */
async function sweepCase({
  linkGbits,
  hopMs,
  hitsAt,
  pool,
  points,
}: Case & Pick<Swept, "linkGbits" | "hopMs">): Promise<readonly Swept[]> {
  const times = points.map((): Partial<Record<Way, number>> => ({}));
  for (const way of WAYS) {
    const deployment = await openVirtualDeployment(way, pool, worldOf(linkGbits, hopMs), {
      hitsAt,
    });
    try {
      for (const [i, point] of points.entries()) {
        const ofPoint = times[i];
        if (ofPoint !== undefined) ofPoint[way] = await deployment.ttftMs(point);
      }
    } finally {
      await deployment.close();
    }
  }
  return points.map((point, i) => ({
    linkGbits,
    hopMs,
    hitsAt,
    point,
    ttftMs: times[i] as Record<Way, number>,
  }));
}
