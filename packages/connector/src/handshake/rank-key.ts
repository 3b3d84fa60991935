/** A rank of an engine as a table key: its pipeline-parallel and tensor-parallel rank, such as "pp0tp3". */
export type RankKey = `pp${number}tp${number}`;

/** The key of a rank; the pipeline-parallel rank is 0 by default. */
export function rankKey({ ppRank = 0, tpRank }: { ppRank?: number | undefined; tpRank: number }): RankKey {
  return `pp${ppRank}tp${tpRank}`;
}
