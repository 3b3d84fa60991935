/** `start`, `start + 1`, … A plain loop: mappings are made by the thousand, and `Array.from` costs more than all else of one. */
export function rankSequence(start: number, length: number): number[] {
  const ranks: number[] = [];
  for (let rank = start; rank < start + length; rank++) ranks.push(rank);
  return ranks;
}
