/**
 * The simulated model: a forward pass of 5 ms per 512 tokens, 8 KiB of KV per token in blocks of
 * 16.
 */
export const FORWARD_MS_PER_512 = 5;
export const SIMULATED = { layers: 4, kvHeads: 4, headDim: 64, maxModelLen: 4096 } as const;
/**
 * What the simulated model writes is freed after it was copied into the pool. The C library keeps
 * such memory, so that a forward pass does not wait for new pages: an accelerator's memory is
 * there.
 */
export const KEEP_FREED_MEMORY = {
  MALLOC_MMAP_THRESHOLD_: `${1 << 30}`,
  MALLOC_TRIM_THRESHOLD_: `${1 << 30}`,
};
export const BLOCK_TOKENS = 16;
export const KV_BYTES_PER_TOKEN =
  SIMULATED.layers * SIMULATED.kvHeads * 2 * SIMULATED.headDim * Float32Array.BYTES_PER_ELEMENT;
/** The bytes of a block in one layer, which one descriptor moves. */
export const BLOCK_BYTES = (KV_BYTES_PER_TOKEN * BLOCK_TOKENS) / SIMULATED.layers;

/**
 * One point of the grid: the lengths of prompts and outputs, the requests at once, and the share of
 * the prompt in D's prefix cache.
 */
export interface Point {
  /**
   * Tokens that all prompts begin with, and that are in D's prefix cache for all but the first.
   * Default: 0.
   */
  readonly sharedTokens?: number | undefined;
  readonly inputTokens: number;
  readonly outputTokens: number;
  readonly atOnce: number;
  readonly hitPercent: 0 | 50 | 100;
  readonly pool: "contiguous" | "fragmented";
}

/** As `vllm bench serve --dataset-name sonnet` by default. */
const SONNET = { inputTokens: 550, outputTokens: 150, sharedTokens: 200 } as const;

/**
 * The points of the grid of 192 that differ from the first in one dimension at a time; and prompts
 * as of vLLM's benchmark, with all hits and pools.
 */
export const SAMPLE: readonly Point[] = [
  ...[128, 512, 1024, 2048].map((inputTokens) => point({ inputTokens })),
  point({ outputTokens: 128, inputTokens: 512 }),
  ...[4, 16].map((atOnce) => point({ atOnce })),
  point({ inputTokens: 128, atOnce: 64 }),
  ...([50, 100] as const).map((hitPercent) => point({ hitPercent })),
  ...[512, 2048].map((inputTokens) => point({ inputTokens, pool: "fragmented" })),
  point({ atOnce: 16, pool: "fragmented" }),
  ...(["contiguous", "fragmented"] as const).flatMap((pool) =>
    ([0, 50, 100] as const).flatMap((hitPercent) =>
      [1, 16].map((atOnce) => point({ ...SONNET, atOnce, hitPercent, pool })),
    ),
  ),
];

function point(changed: Partial<Point>): Point {
  return {
    inputTokens: 1024,
    outputTokens: 16,
    atOnce: 1,
    hitPercent: 0,
    pool: "contiguous",
    ...changed,
  };
}

export function nameOf({
  inputTokens,
  outputTokens,
  atOnce,
  hitPercent,
  pool,
  sharedTokens = 0,
}: Point): string {
  const shared = sharedTokens > 0 ? `, ${sharedTokens} shared` : "";
  return `${inputTokens}→${outputTokens}${shared}, ${atOnce} at once, hit ${hitPercent} %, ${pool}`;
}

/** Tokens at the begin of a prompt that are in D's prefix cache, in whole blocks. */
export function cachedTokens({ inputTokens, hitPercent, sharedTokens = 0 }: Point): number {
  return (
    Math.floor(Math.max(sharedTokens, (inputTokens * hitPercent) / 100) / BLOCK_TOKENS) *
    BLOCK_TOKENS
  );
}

/**
 * Makes prompts of which no two share more than their first `sharedTokens`. One token more than
 * whole blocks: a prefix cache holds whole blocks, and the last token is always computed.
 */
export function promptMaker(): (point: Pick<Point, "inputTokens" | "sharedTokens">) => number[] {
  let made = 0;
  return ({ inputTokens, sharedTokens = 0 }) => {
    made += 1;
    return Array.from({ length: inputTokens + 1 }, (_, i) =>
      i < sharedTokens
        ? 3 + ((i * 37) % 1000)
        : 3 + ((made * 7919 + i * 31 + ((made * i) % 13)) % 1000),
    );
  };
}
