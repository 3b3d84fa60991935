import type { RankGeometry, RequestBlocks } from "@kv/plan";
import type { Pair } from "../input/pair.js";

/**
 * Block ids of the sample request: one stretch, or stretches of four with gaps as in a used pool.
 */
export type PoolState = "consecutive" | "fragmented";

export interface RequestSettings {
  readonly numTokens: number;
  /**
   * Logical decode blocks that a prefix hit supplies. Groups with other block sizes get the same
   * tokens.
   */
  readonly computedBlocks: number;
  readonly pool: PoolState;
}

/** Blocks in a stretch of a fragmented pool. */
const STRETCH = 4;

/** Undefined where a pool is too small for the request. */
export function sampleRequest(pair: Pair, settings: RequestSettings): RequestBlocks | undefined {
  const remoteBlockIds = tables(pair, pair.prefill, settings);
  const localTables = tables(pair, pair.decode, settings);
  if (remoteBlockIds === undefined || localTables === undefined) return undefined;
  const [decode] = pair.decode;
  const localComputedBlocks = pair.groups.map((kind, group) =>
    decode === undefined || !isSequence(kind)
      ? 0
      : Math.floor((settings.computedBlocks * blockTokens(decode)) / blockTokens(decode, group)),
  );
  return {
    localBlockIds: localTables.map((table, group) => table.slice(localComputedBlocks[group])),
    remoteBlockIds,
    numTokens: settings.numTokens,
    localComputedBlocks,
  };
}

function blockTokens(rank: RankGeometry, group?: number): number {
  const own = group === undefined ? undefined : rank.groupBlockTokens?.[group];
  return own ?? rank.kernelBlockSize * rank.physicalBlocksPerLogical;
}

/** Whether a prefix hit leaves blocks out: windows and states are handed over whole. */
const isSequence = (kind: string | undefined) => kind === "full" || kind === "mla";

function tables(
  pair: Pair,
  ranks: readonly RankGeometry[],
  settings: RequestSettings,
): number[][] | undefined {
  const [rank] = ranks;
  if (rank === undefined) return undefined;
  // All pipeline stages share one block table.
  const fewest = Math.min(
    ...ranks.flatMap(({ regions }) => regions.map(({ numBlocks }) => numBlocks)),
  );
  const pool = Math.floor(fewest / rank.physicalBlocksPerLogical);
  let [next, last] = [1, 0];
  const taken = pair.groups.map((kind, group) => {
    const each = blockTokens(rank, group);
    const whole = kind === "mamba" ? 1 : Math.ceil(settings.numTokens / each);
    const window = pair.windowTokens[group];
    // A window's list holds all blocks that the last token's window can reach.
    const count = window === undefined ? whole : Math.min(whole, Math.ceil(window / each) + 1);
    return Array.from({ length: count }, (_, index) => {
      const id = next;
      last = id;
      next += settings.pool === "fragmented" && index % STRETCH === STRETCH - 1 ? 3 : 1;
      return id;
    });
  });
  return last < pool ? taken : undefined;
}
