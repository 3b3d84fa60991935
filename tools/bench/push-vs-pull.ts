// `processes`: the whole demo on this machine. `links`: links that this machine lacks, with the
// production code on a virtual clock.
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
const [, ...PUSHES] = Object.keys(WAYS);

export const POINT = {
  inputTokens: 1024,
  outputTokens: 4,
  atOnce: 1,
  sharedTokens: 0,
  hitPercent: 0,
  hitsAt: "D" as "P" | "D",
  fragmented: false,
};
type Point = typeof POINT;
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

/** No two prompts share more than `sharedTokens`. */
async function ttftMs({ send, settled }: Deployment, point: Point): Promise<number> {
  const { inputTokens, outputTokens, sharedTokens, hitPercent, hitsAt } = point;
  const warm = hitsAt === "P" ? send.P : send.proxy;
  const prompts = Array.from({ length: point.atOnce }, () => {
    made += 1;
    // A prefix cache holds whole blocks, and the last token is always computed.
    return [...tokens(sharedTokens, 0, 0), ...tokens(inputTokens + 1 - sharedTokens, 1, made)];
  });
  const hitTokens = Math.max(sharedTokens, (inputTokens * hitPercent) / 100);
  const cached = Math.floor(hitTokens / BLOCK_TOKENS) * BLOCK_TOKENS;
  if (cached > 0) for (const prompt of prompts) await settled(warm(prompt.slice(0, cached + 1), 1));
  const sent = await settled(
    Promise.all(prompts.map((prompt) => send.proxy(prompt, outputTokens))),
  );
  return median(sent.map((one) => one.ttftMs));
}

/** The points have the same caches and pools. */
export async function onLink(link: VirtualOptions, points: readonly Point[]): Promise<number[][]> {
  const times = points.map((): number[] => []);
  const { fragmented, hitsAt } = points[0] ?? POINT;
  for (const cluster of Object.values(WAYS)) {
    await using deployment = await openVirtual({
      ...link,
      cluster,
      fragmented,
      prefillCaches: hitsAt === "P",
    });
    for (const [at, point] of points.entries()) {
      times[at]?.push(await ttftMs(deployment, point));
      // Notifications that are still under way do not delay the next point.
      await deployment.clock.advance(1000);
    }
  }
  return times;
}

async function links({ short }: Run) {
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

/** The ways take turns. */
async function processes(run: Run) {
  const rows: Row[] = [];
  for (const fragmented of [false, true]) {
    const deployments = new Map<string, Deployment>();
    try {
      for (const [way, options] of Object.entries(WAYS))
        deployments.set(way, await openWarm({ ...options, fragmented }));
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
  deployments: ReadonlyMap<string, Deployment>,
  point: Point,
  rounds: number,
) {
  const times: Record<string, number[]> = {};
  const order = Array.from(deployments);
  for (let round = 0; round < rounds; round++) {
    for (const [way, deployment] of order) {
      times[way] ??= [];
      times[way].push(await ttftMs(deployment, point));
    }
    order.push(...order.splice(0, 1));
  }
  const [pull = [], ...pushes] = Object.keys(WAYS).map((way) => times[way] ?? []);
  return pushes.map((own, at) => {
    const way = PUSHES[at];
    const bound = point.atOnce === 16 && way === "push" ? WANTED_GAIN : undefined;
    const shown = [spread(own, "ms"), spread(pull, "ms")] as const;
    const what = `TTFT ${nameOf(point)}: pull / ${way}`;
    return { ...rowOf(what, shown, pairRatio(pull, own), ">=", bound), rounds };
  });
}

/**
 * The proxy knows P's address, D and P have shaken hands, code is compiled, and each page of the
 * pools is written.
 */
async function openWarm({
  fragmented,
  ...way
}: (typeof WAYS)[keyof typeof WAYS] & { readonly fragmented: boolean }): Promise<Deployment> {
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
