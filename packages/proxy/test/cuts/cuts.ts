import { createHash } from "node:crypto";
import fc from "fast-check";

/** Set by `npm run test:long -- --only stream-cuts`: every answer is cut at every byte. */
export const ALL = process.env["KV_STREAM_CUTS"] === "all";
const SEED = process.env["KV_SEED"] ?? "stream cuts";

/** The bytes of a body as the reads of the network bring them. */
export type Cut = (bytes: Buffer) => readonly Buffer[];

/** All of it is there with the head. */
export const UNCUT: Cut = (bytes) => [bytes];

/** A read ends after each of these many bytes. */
export function cutAt(positions: readonly number[]): Cut {
  return (bytes) => {
    const ends = positions.map((at) => Math.min(at, bytes.length)).sort((a, b) => a - b);
    return [...ends, bytes.length].map((end, i) => bytes.subarray(ends[i - 1] ?? 0, end));
  };
}

/** Each position of a body of this length, its end included. */
export function everyByte(lengthBytes: number): number[][] {
  return Array.from({ length: lengthBytes + 1 }, (_, at) => [at]);
}

/** So many times `each` positions of a body, which depend on `what` and the seed. */
export function randomCuts(
  count: number,
  each: number,
  what: string,
): (lengthBytes: number) => number[][] {
  const seed = createHash("sha256").update(`${SEED} ${what}`).digest().readInt32LE();
  return (lengthBytes) => {
    const position = fc.nat({ max: lengthBytes });
    return fc.sample(fc.array(position, { minLength: each, maxLength: each }), {
      seed,
      numRuns: count,
    });
  };
}
