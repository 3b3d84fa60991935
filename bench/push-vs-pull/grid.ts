/** One point of the grid: how long prompts and outputs are, how many are sent at once, and what D has of them. */
export interface Point {
  readonly inputTokens: number;
  readonly outputTokens: number;
  readonly atOnce: number;
  readonly hitPercent: 0 | 50 | 100;
  readonly pool: "contiguous" | "fragmented";
}

/** Of the whole grid of 192 points those in which one thing at a time is changed; the rest says nothing that these do not. */
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
