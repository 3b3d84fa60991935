import { median } from "../../report.js";
import { MODEL } from "./sweep.js";

/** Who posts a transfer, and where its post waits. */
const WAYS = {
  "pull, posts in D's step": { reads: true, inStep: true },
  "push, posts in P's step": { reads: false, inStep: true },
  "pull, posts on a thread of their own": { reads: true, inStep: false },
  "push, posts on a thread of their own": { reads: false, inStep: false },
} as const;
type Way = keyof typeof WAYS;

/** As `vllm bench serve --dataset-name sonnet` asks. Times in ms. */
const LOAD = {
  requests: 200,
  tokens: 550,
  outputTokens: 150,
  hopMs: 0.1,
  linkBytesPerMs: 12.5e6,
} as const;
/** From one request to the next: 12.5 and 6.25 a second. */
const EVERY_MS = [80, 160] as const;
/** D's step with a batch of such requests. */
export const STEP_MS = 8;
/** A post of the source: with its descriptors in one run, and in a fragmented pool. */
export const POST_MS = { contiguous: 0.46, fragmented: 46 } as const;

export interface Measured {
  readonly ttftMs: number;
  /** From one token of a request to the next. */
  readonly tpotMs: number;
}

/**
 * P and D as loops of steps: vLLM posts a transfer within a step of the engine that moves the
 * bytes, so a post delays all that the step computes. P computes one prompt a step; D computes a
 * token of each running request a step. Returns medians.
 */
export function decodePath(way: Way, postMs: number, everyMs: number, stepMs = STEP_MS): Measured {
  const { reads, inStep } = WAYS[way];
  const { requests, tokens, outputTokens, hopMs, linkBytesPerMs } = LOAD;
  const forwardMs = (MODEL.forwardMsPer512Tokens * tokens) / 512;
  const bytesMs = (MODEL.kvBytesPerToken * tokens) / linkBytesPerMs;
  let pFree = 0;
  /** When a request's work comes to D: to be read, or with its bytes in place. */
  const atD = Array.from({ length: requests }, (_, i) => {
    const ended = Math.max(i * everyMs + 2 * hopMs, pFree) + forwardMs;
    pFree = ended + (inStep && !reads ? postMs : 0);
    return reads ? ended + 2 * hopMs : ended + postMs + hopMs + bytesMs;
  });
  const landed: { request: number; atMs: number }[] = reads
    ? []
    : atD.map((atMs, request) => ({ request, atMs }));
  const running = new Map<number, number>();
  const ttfts: number[] = [];
  const gaps: number[] = [];
  let [now, asked] = [0, reads ? 0 : requests];
  let lastStepMs: number | undefined;
  while (ttfts.length < requests || running.size > 0) {
    for (; asked < requests && (atD[asked] ?? 0) <= now; asked++) {
      if (inStep) now += postMs;
      landed.push({ request: asked, atMs: now + (inStep ? 0 : postMs) + hopMs + bytesMs });
    }
    for (const one of landed.filter(({ atMs }) => atMs <= now)) {
      landed.splice(landed.indexOf(one), 1);
      running.set(one.request, outputTokens);
    }
    if (running.size === 0) {
      // An engine without work waits for the next request or the next bytes.
      now = Math.min(...landed.map(({ atMs }) => atMs), atD[asked] ?? Number.POSITIVE_INFINITY);
      lastStepMs = undefined;
      continue;
    }
    now += stepMs;
    for (const [request, left] of running) {
      if (left === outputTokens) ttfts.push(now + 2 * hopMs - request * everyMs);
      else if (lastStepMs !== undefined) gaps.push(now - lastStepMs);
      if (left === 1) running.delete(request);
      else running.set(request, left - 1);
    }
    lastStepMs = now;
  }
  return { ttftMs: median(ttfts), tpotMs: gaps.reduce((sum, ms) => sum + ms, 0) / gaps.length };
}

/** The table of docs/bench/push-vs-pull-links.md. */
function decodePathTable(): string {
  const { contiguous, fragmented } = POST_MS;
  const ways = Object.keys(WAYS) as Way[];
  const cases = [
    ...ways.map((way) => [way, contiguous] as const),
    ...ways.map((way) => [way, fragmented] as const),
  ];
  const rows = cases.map(([way, postMs]) => {
    const cells = EVERY_MS.flatMap((everyMs) => {
      const { ttftMs, tpotMs } = decodePath(way, postMs, everyMs);
      return [ttftMs.toFixed(0), tpotMs.toFixed(1)];
    });
    return `| ${way} | ${postMs} ms | ${cells.join(" | ")} |`;
  });
  const rates = EVERY_MS.map((ms) => 1000 / ms).flatMap((rate) => [
    `TTFT at ${rate}/s`,
    `TPOT at ${rate}/s`,
  ]);
  return [
    `| way | a post | ${rates.join(" | ")} |`,
    "| --- | ---: | ---: | ---: | ---: | ---: |",
    ...rows,
  ].join("\n");
}

/** The section of the page: which of the source's two causes gives how much. */
export function decodePathSection(): string {
  return `## The source's two causes

The author of vLLM's push ([PR 35264](https://github.com/vllm-project/vllm/pull/35264)) saw TTFT 1.2 to 3.0 times better than with pull, and names two causes.

- **A full hit at D: 3 and more.** D answers without P. The table of prefix hits above has the same, and more.
- **Fragmented memory: 1.3 to 2.** With scattered blocks a post takes 46 ms instead of 0.46. vLLM posts within a step of the engine that moves the bytes: D's in pull, where each running request waits for it; P's in push.

The second cause has a model of its own (\`tools/bench/push-vs-pull/links/decode-path.ts\`), because the embedded transport posts in no step: P computes a prompt of ${LOAD.tokens} tokens a step, D a token of each running request in ${STEP_MS} ms, and every request wants ${LOAD.outputTokens} tokens.
Times in ms, medians of the time to the first token (TTFT) and means of the time per output token (TPOT), on 100 Gb/s and hops of ${LOAD.hopMs} ms:

${decodePathTable()}

- A long post in D's step is what pull loses in TPOT: 1.4 to 2.2 times as long. It is gone in push, and with a post on a thread of its own.
- TTFT has one post, wherever it is made. Push is 2 times better only where its post is short and pull's is long: where the pool of the one that posts is fragmented at D and not at P, or where P posts while it computes.
- Our transports post on a thread of their own (\`@kv/nixl\`) and cut large posts into slices, in both ways. So our pull has no part of the second cause, and our push gains only the rest: three hops, the hit at D, and what layer-wise push hides.
`;
}
