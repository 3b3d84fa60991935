import type { PostingReport } from "../report/report.js";

const number = (count: number) => count.toLocaleString("en-US");
const time = (ms: number) => Number(ms.toPrecision(2));

/** A request's posting as lines: its descriptors, their cost, and what would save some. */
export function postingLines(posting: PostingReport): readonly string[] {
  const { descriptors, merged, decodeRank, estimates, mergedByPool, fewer } = posting;
  const { consecutive, fragmented } = mergedByPool;
  const pools = [
    ...(consecutive === null ? [] : [`${number(consecutive)} in pools in order`]),
    ...(fragmented === null ? [] : [`${number(fragmented)} in pools in stretches of 4 blocks`]),
    `${number(descriptors)} in scattered pools`,
  ];
  const costs = estimates.map(({ transport, microsecondsEach, mergedMs, scatteredMs, source }) => {
    const range =
      merged === descriptors
        ? `${time(scatteredMs)} ms`
        : `${time(mergedMs)} ms, scattered ${time(scatteredMs)} ms`;
    return `posting over ${transport}: ${range} (${microsecondsEach} µs each: ${source})`;
  });
  return [
    `D${decodeRank} posts ${number(descriptors)} descriptors. NIXL merges neighbours: ${pools.join(", ")}`,
    ...costs,
    ...fewer.map(
      (one) =>
        `fewer with ${one.change}: ${number(one.descriptors)} descriptors, ${number(one.merged)} after merging`,
    ),
  ];
}
