/** The side-channel address and the parallel sizes of an engine. Plain data. */
export interface EngineAddress {
  /** The engine's id, unique per start. */
  readonly engineId: string;
  /** Host of the engine's side channel. */
  readonly host: string;
  /** Port of the engine's side channel. */
  readonly port: number;
  /** Tensor-parallel size. */
  readonly tpSize: number;
  /** Decode-context-parallel size. */
  readonly dcpSize: number;
  /** Pipeline-parallel size. */
  readonly ppSize: number;
  /**
   * How often the engine has registered its KV cache. When it is higher than at the last handshake,
   * D repeats the handshake. @default 0
   */
  readonly registrationGeneration?: number | undefined;
}

/**
 * The key of an engine in tables: id, address and sizes. Requests name all of these themselves, so
 * a request with wrong values gets an entry of its own and cannot disturb requests with the right
 * ones.
 */
export function engineKey({
  engineId,
  host,
  port,
  tpSize,
  dcpSize,
  ppSize,
}: EngineAddress): string {
  return JSON.stringify([engineId, host, port, tpSize, dcpSize, ppSize]);
}

/**
 * The address alone, without the registration of the engine's cache and without what a message has
 * besides.
 */
export function addressOf({
  engineId,
  host,
  port,
  tpSize,
  dcpSize,
  ppSize,
}: EngineAddress): EngineAddress {
  return { engineId, host, port, tpSize, dcpSize, ppSize };
}

/** The engine's name in error messages and logs. */
export function describeEngine({ engineId, host, port }: EngineAddress): string {
  return `engine ${engineId} at ${host}:${port}`;
}

/**
 * A rank of an engine as a table key: its pipeline-parallel and tensor-parallel rank, such as
 * "pp0tp3".
 */
export type RankKey = `pp${number}tp${number}`;

/** The key of a rank; the pipeline-parallel rank is 0 by default. */
export function rankKey({
  ppRank = 0,
  tpRank,
}: {
  ppRank?: number | undefined;
  tpRank: number;
}): RankKey {
  return `pp${ppRank}tp${tpRank}`;
}
