// TTFT of pull and push. `processes`: through the whole demo on this machine, in turn in one run.
// `links`: on links that this machine lacks, with the production code on a virtual clock.
import { tokens } from "./conversations.js";
import {
  BLOCK_TOKENS,
  type Deployment,
  ONE_PAIR,
  openProcesses,
  SIMULATED,
} from "./deployments.js";
import { median, pairRatio, type Row, rowOf, spread } from "./report.js";
import type { Run } from "./run.js";
import { openVirtual, type VirtualOptions } from "./virtual-deployment.js";

const WAYS = {
  pull: { connector: "NixlConnector" },
  push: { connector: "push" },
  "push, layer-wise": { connector: "push", pushLayerwise: true },
} as const;
type Way = keyof typeof WAYS;
const [PULL, ...PUSHES] = Object.keys(WAYS) as Way[];

interface Point {
  readonly inputTokens: number;
  readonly outputTokens: number;
  readonly atOnce: number;
  /** Tokens that all prompts begin with, and that are in D's prefix cache. */
  readonly sharedTokens: number;
  /** The part of each prompt that is in a prefix cache, and whose. */
  readonly hitPercent: 0 | 50 | 100;
  readonly hitsAt: "P" | "D";
  readonly fragmented: boolean;
}

export const POINT: Point = {
  inputTokens: 1024,
  outputTokens: 4,
  atOnce: 1,
  sharedTokens: 0,
  hitPercent: 0,
  hitsAt: "D",
  fragmented: false,
};
/** As `vllm bench serve --dataset-name sonnet` by default. */
const SONNET = { inputTokens: 550, outputTokens: 150, sharedTokens: 200 } as const;
const HITS = [0, 50, 100] as const;

/** Of links, in Gb/s, with the times of a message. */
const LINKS = [25, 100, 400].flatMap((linkGbits) =>
  [0.1, 0.5].map((hopMs) => ({ linkGbits, hopMs })),
);
const LINK_POINTS: readonly (readonly Partial<Point>[])[] = [
  [
    {},
    { atOnce: 16 },
    { inputTokens: 128 },
    { inputTokens: 4096 },
    { hitPercent: 50 },
    { hitPercent: 100 },
    { hitPercent: 100, atOnce: 16 },
  ],
  [{ hitPercent: 100, atOnce: 16, hitsAt: "P" }],
  [{ fragmented: true }],
];
const PROCESS_POINTS: readonly Partial<Point>[] = [
  { inputTokens: 128 },
  { inputTokens: 512 },
  {},
  { inputTokens: 2048 },
  { atOnce: 4 },
  { atOnce: 16 },
  { hitPercent: 50 },
  { hitPercent: 100 },
  ...HITS.flatMap((hitPercent) => [1, 16].map((atOnce) => ({ ...SONNET, atOnce, hitPercent }))),
  { inputTokens: 2048, fragmented: true },
  { atOnce: 16, fragmented: true },
  ...[1, 16].map((atOnce) => ({ ...SONNET, atOnce, fragmented: true })),
];

const FORWARD_MS_PER_512 = 5;
const CACHE_TOKENS = 24_576;
const ROUNDS = 5;
/** Wanted of push with 16 requests at once. */
const WANTED_GAIN = 1.2;

function nameOf(point: Point): string {
  const { inputTokens, outputTokens, sharedTokens, atOnce, hitPercent, hitsAt, fragmented } = point;
  return [
    `${inputTokens}→${outputTokens}`,
    ...(sharedTokens > 0 ? [`${sharedTokens} shared`] : []),
    `${atOnce} at once`,
    ...(hitPercent > 0 ? [`hit ${hitPercent} % at ${hitsAt}`] : []),
    ...(fragmented ? ["fragmented"] : []),
  ].join(", ");
}

let made = 0;

/**
 * Sends a point's requests at once. No two prompts share more than `sharedTokens`. Returns the
 * median time to the first token.
 */
async function ttftMs({ send, settled }: Deployment, point: Point): Promise<number> {
  const { inputTokens, outputTokens, sharedTokens, hitPercent, hitsAt } = point;
  const prompts = Array.from({ length: point.atOnce }, () => {
    made += 1;
    // A prefix cache holds whole blocks, and the last token is always computed.
    return [...tokens(sharedTokens, 0, 0), ...tokens(inputTokens + 1 - sharedTokens, 1, made)];
  });
  const hitTokens = Math.max(sharedTokens, (inputTokens * hitPercent) / 100);
  const cached = Math.floor(hitTokens / BLOCK_TOKENS) * BLOCK_TOKENS;
  if (cached > 0)
    for (const prompt of prompts)
      await settled(send(prompt.slice(0, cached + 1), 1, hitsAt === "P" ? "P" : "proxy"));
  const sent = await settled(Promise.all(prompts.map((prompt) => send(prompt, outputTokens))));
  return median(sent.map((one) => one.ttftMs));
}

/**
 * The TTFT of each way at each point of a simulated link. The points have the same caches and
 * pools.
 */
export async function onLink(link: VirtualOptions, points: readonly Point[]): Promise<number[][]> {
  const times = points.map((): number[] => []);
  for (const cluster of Object.values(WAYS)) {
    const fragmented = points[0]?.fragmented === true;
    const prefillCaches = points[0]?.hitsAt === "P";
    const deployment = await openVirtual({ ...link, cluster, fragmented, prefillCaches });
    try {
      for (const [at, point] of points.entries()) {
        times[at]?.push(await ttftMs(deployment, point));
        // Notifications that are still under way do not delay the next point.
        await deployment.clock.advance(1000);
      }
    } finally {
      await deployment.close();
    }
  }
  return times;
}

async function links({ short }: Run): Promise<readonly Row[]> {
  const rows: Row[] = [];
  for (const link of short ? LINKS.slice(2, 3) : LINKS) {
    const name = `${link.linkGbits} Gb/s, ${link.hopMs} ms`;
    process.stderr.write(`  ${name}\n`);
    for (const changes of LINK_POINTS) {
      const points = changes.map((changed) => ({ ...POINT, ...changed }));
      const times = await onLink(link, points);
      for (const [at, point] of points.entries()) {
        const [pull = 0, push = 0, layers = 0] = times[at] ?? [];
        const gains = [push, layers].map((ms) => (pull / ms).toFixed(2)).join(", ");
        const shown = [push, layers].map((ms) => ms.toFixed(2)).join(", ");
        const what = `${name}: ${nameOf(point)}: pull / push, pull / layer-wise: ${gains}`;
        const both = [`${shown} ms`, `${pull.toFixed(2)} ms`] as const;
        rows.push(rowOf(what, both, pull / Math.min(push, layers)));
      }
    }
  }
  return rows;
}

/** The time to the first token of each way, in rounds in which the ways take turns. */
async function processes(run: Run): Promise<readonly Row[]> {
  const rows: Row[] = [];
  for (const fragmented of [false, true]) {
    const deployments = new Map<Way, Deployment>();
    try {
      for (const [way, options] of Object.entries(WAYS))
        deployments.set(way as Way, await openWarm({ ...options, fragmented }));
      const points = PROCESS_POINTS.filter((point) => (point.fragmented ?? false) === fragmented);
      for (const changed of run.short ? points.slice(0, 2) : points) {
        const point = { ...POINT, outputTokens: 16, ...changed };
        process.stderr.write(`  ${nameOf(point)}\n`);
        rows.push(...(await compareWays(deployments, point, run.rounds(ROUNDS))));
      }
    } finally {
      for (const deployment of deployments.values()) await deployment.close();
    }
  }
  return rows;
}

async function compareWays(
  deployments: ReadonlyMap<Way, Deployment>,
  point: Point,
  rounds: number,
): Promise<Row[]> {
  const times = new Map(Array.from(deployments.keys(), (way) => [way, [] as number[]]));
  for (let round = 0; round < rounds; round++) {
    const order = Array.from(deployments);
    // Another way begins in each round.
    for (const [way, deployment] of [...order.slice(round % 3), ...order.slice(0, round % 3)])
      times.get(way)?.push(await ttftMs(deployment, point));
  }
  const pull = times.get(PULL as Way) ?? [];
  return PUSHES.map((way) => {
    const own = times.get(way) ?? [];
    const bound = point.atOnce === 16 && way === "push" ? WANTED_GAIN : undefined;
    const shown = [spread(own, "ms"), spread(pull, "ms")] as const;
    const what = `TTFT ${nameOf(point)}: pull / ${way}`;
    return { ...rowOf(what, shown, pairRatio(pull, own), ">=", bound), rounds };
  });
}

/**
 * The proxy has learnt P's address from its first answer, D and P have shaken hands, code is
 * compiled, and each page of the pools is written.
 */
async function openWarm({
  fragmented,
  ...way
}: (typeof WAYS)[Way] & { readonly fragmented: boolean }): Promise<Deployment> {
  const simulate = { ...SIMULATED, forwardMsPer512Tokens: FORWARD_MS_PER_512 };
  const deployment = await openProcesses({
    ...ONE_PAIR,
    ...way,
    cacheTokens: CACHE_TOKENS,
    instance: { simulate, fragmented, digests: false },
    prefillInstance: { prefixCaching: false },
  });
  const long = { ...POINT, inputTokens: CACHE_TOKENS / 12, outputTokens: 2 };
  for (let sent = 0; sent < 16; sent++) await ttftMs(deployment, long);
  const short = { ...POINT, inputTokens: 128, outputTokens: 16, atOnce: 16 };
  for (let sent = 0; sent < 8; sent++) await ttftMs(deployment, short);
  return deployment;
}

export const pushVsPull = (run: Run) => run.parts({ processes, links }, run);
