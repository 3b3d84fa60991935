/** `start`, `start + 1`, … A plain loop: mappings are made by the thousand, and `Array.from` costs more than all else of one. */
export function rankSequence(start: number, length: number): number[] {
  const ranks: number[] = [];
  for (let rank = start; rank < start + length; rank++) ranks.push(rank);
  return ranks;
}

/** Mappings have one rank in most of their places; to freeze a list takes longer than to make it. */
const SINGLE: readonly (readonly number[])[] = rankSequence(0, 256).map((rank) => Object.freeze([rank]));

/** A frozen list of this rank alone. */
export function oneRank(rank: number): readonly number[] {
  return SINGLE[rank] ?? Object.freeze([rank]);
}
