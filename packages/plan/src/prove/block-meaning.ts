import type { KvCacheKind } from "@kv/interface";
import type { ModelGeometry, RankGeometry, RegionGeometry } from "../geometry.js";

/** One loop over a tile, outermost first. Positions along it are counted for the whole model, those of tokens within the block. */
interface TileAxis {
  readonly axis: "head" | "token";
  readonly begin: number;
  readonly size: number;
}

/**
 * What the bytes of a block stand for: nested loops over heads and tokens around cells of `cellBytes`. `inside` names the order within a
 * cell; where it is equal, byte i of one cell means what byte i of the other does (K first, then V, for plain caches).
 */
export interface BlockMeaning {
  readonly axes: readonly TileAxis[];
  readonly cellBytes: number;
  readonly inside: string;
  /** Tokens that a step along the token axis stands for: 1, or a whole block where the order of tokens is the backend's own. */
  readonly tokensPerStep: number;
}

/** The meaning of one byte, and how far the next bytes go on in the same way. */
export interface BytePlace {
  readonly head: number;
  readonly token: number;
  readonly cellByte: number;
  /** Bytes until the innermost loop ends. */
  readonly runBytes: number;
  readonly runAxis: "head" | "token" | "cell";
}

/**
 * KV heads of a rank, by how tensor parallelism deals them out: equal shares, or one head for several neighbours where there are more
 * ranks than heads. Said here anew, and not taken from the mapping that is to be proven.
 */
export function headsOfRank(
  rank: RankGeometry,
  numKvHeads: number,
  kind: KvCacheKind,
): { begin: number; size: number } {
  if (kind === "mla") return { begin: 0, size: 1 };
  const share = numKvHeads / rank.tpSize;
  return share >= 1
    ? { begin: rank.tpRank * share, size: share }
    : { begin: Math.floor(rank.tpRank * share), size: 1 };
}

/** By the letters of the layout: whose loop is outside within a block of one layer. */
const HEAD_OUTSIDE: Readonly<Record<string, boolean | undefined>> = {
  LBHNC: true,
  BLHNC: true,
  LBNHC: false,
  BLNHC: false,
};

/**
 * Reads a region's block by the letters of its layout. `ownOrder`: the attention backend orders tokens within a head in its own way, so a
 * head's share of a block is one cell. Undefined when the block does not divide as the layout says.
 */
export function meaningOfBlock(
  rank: RankGeometry,
  region: RegionGeometry,
  model: ModelGeometry,
  kind: KvCacheKind,
  ownOrder: string | undefined,
): BlockMeaning | undefined {
  const heads = headsOfRank(rank, model.numKvHeads, kind);
  const tokens = rank.kernelBlockSize;
  const head: TileAxis = { axis: "head", ...heads };
  const headOutside = heads.size === 1 ? true : HEAD_OUTSIDE[rank.layout];
  const whole: TileAxis = { axis: "token", begin: 0, size: 1 };
  if (headOutside === undefined || (ownOrder !== undefined && !headOutside)) {
    // Heads of a layer are not together, or lie in an order unknown: a block is known as a whole only.
    const order = `${rank.layout} ${ownOrder ?? "plain"}`;
    const inside = `a whole block of ${order}, ${heads.size} heads from ${heads.begin}, ${tokens} tokens`;
    return { axes: [whole], cellBytes: region.blockLengthBytes, inside, tokensPerStep: tokens };
  }
  if (ownOrder !== undefined) {
    const cellBytes = region.blockLengthBytes / heads.size;
    if (!Number.isInteger(cellBytes)) return undefined;
    return {
      axes: [head, whole],
      cellBytes,
      inside: `${ownOrder}, ${tokens} tokens`,
      tokensPerStep: tokens,
    };
  }
  const cellBytes = region.blockLengthBytes / (heads.size * tokens);
  if (!Number.isInteger(cellBytes)) return undefined;
  const token: TileAxis = { axis: "token", begin: 0, size: tokens };
  return {
    axes: headOutside ? [head, token] : [token, head],
    cellBytes,
    inside: ownOrder ?? "plain",
    tokensPerStep: 1,
  };
}

/** The meaning of the byte at an offset into the block. */
export function placeAt(meaning: BlockMeaning, offset: number): BytePlace {
  const cell = Math.floor(offset / meaning.cellBytes);
  const cellByte = offset - cell * meaning.cellBytes;
  const at = { head: 0, token: 0 };
  let rest = cell;
  let runAxis: BytePlace["runAxis"] = "cell";
  let runBytes = meaning.cellBytes - cellByte;
  for (let index = meaning.axes.length - 1; index >= 0; index--) {
    const loop = meaning.axes[index] as TileAxis;
    const position = rest % loop.size;
    rest = (rest - position) / loop.size;
    at[loop.axis] = (loop.begin + position) * (loop.axis === "token" ? meaning.tokensPerStep : 1);
    if (index === meaning.axes.length - 1 && loop.size > 1) {
      runAxis = loop.axis;
      runBytes += (loop.size - 1 - position) * meaning.cellBytes;
    }
  }
  return { ...at, cellByte, runBytes, runAxis };
}
