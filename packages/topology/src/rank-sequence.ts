/**
 * `start`, `start + 1`, and so on. A plain loop: mappings are built by the thousand, and
 * `Array.from` costs more than the rest of a mapping.
 */
export function rankSequence(start: number, length: number): number[] {
  const ranks: number[] = [];
  for (let rank = start; rank < start + length; rank++) ranks.push(rank);
  return ranks;
}

/**
 * Frozen lists of one rank. Most lists of a mapping have one rank, and to freeze a list takes
 * longer than to create it.
 */
const SINGLE: readonly (readonly number[])[] = rankSequence(0, 256).map((rank) =>
  Object.freeze([rank]),
);

/** A frozen list with this rank alone. */
export function oneRank(rank: number): readonly number[] {
  return SINGLE[rank] ?? Object.freeze([rank]);
}
