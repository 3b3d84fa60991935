/** The simulated model: a forward pass of 5 ms per 512 tokens, 8 KiB of KV per token in blocks of 16. */
export const FORWARD_MS_PER_512 = 5;
export const SIMULATED = { layers: 4, kvHeads: 4, headDim: 64, maxModelLen: 4096 } as const;
export const BLOCK_TOKENS = 16;
export const KV_BYTES_PER_TOKEN =
  SIMULATED.layers * SIMULATED.kvHeads * 2 * SIMULATED.headDim * Float32Array.BYTES_PER_ELEMENT;
/** The bytes of a block in one layer, which one descriptor moves. */
export const BLOCK_BYTES = (KV_BYTES_PER_TOKEN * BLOCK_TOKENS) / SIMULATED.layers;

/** One point of the grid: the lengths of prompts and outputs, the requests at once, and the share of the prompt in D's prefix cache. */
export interface Point {
  readonly inputTokens: number;
  readonly outputTokens: number;
  readonly atOnce: number;
  readonly hitPercent: 0 | 50 | 100;
  readonly pool: "contiguous" | "fragmented";
}

/** The points of the grid of 192 that differ from the first in one dimension at a time. */
export const SAMPLE: readonly Point[] = [
  ...[128, 512, 1024, 2048].map((inputTokens) => point({ inputTokens })),
  point({ outputTokens: 128, inputTokens: 512 }),
  ...[4, 16].map((atOnce) => point({ atOnce })),
  point({ inputTokens: 128, atOnce: 64 }),
  ...([50, 100] as const).map((hitPercent) => point({ hitPercent })),
  ...[512, 2048].map((inputTokens) => point({ inputTokens, pool: "fragmented" })),
  point({ atOnce: 16, pool: "fragmented" }),
];

function point(changed: Partial<Point>): Point {
  return { inputTokens: 1024, outputTokens: 16, atOnce: 1, hitPercent: 0, pool: "contiguous", ...changed };
}

export function nameOf({ inputTokens, outputTokens, atOnce, hitPercent, pool }: Point): string {
  return `${inputTokens}→${outputTokens}, ${atOnce} at once, hit ${hitPercent} %, ${pool}`;
}
