/** A rank of an engine as a key of tables: its pipeline stage and its tensor-parallel rank, such as "pp0tp3". */
export type RankKey = `pp${number}tp${number}`;

export function rankKey({ ppRank = 0, tpRank }: { ppRank?: number | undefined; tpRank: number }): RankKey {
  return `pp${ppRank}tp${tpRank}`;
}
