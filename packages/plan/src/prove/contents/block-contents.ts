import type { ModelGeometry, RankGeometry, RegionGeometry } from "../../geometry/rank-geometry.js";
import { cacheSemantics, headsInRegion, tokensInBlock } from "./cache-semantics.js";

/**
 * One loop over a tile, outermost first. Heads are counted over the whole model, tokens within the
 * block.
 */
interface TileAxis {
  readonly axis: "head" | "token";
  readonly begin: number;
  readonly size: number;
}

/**
 * A stretch of a block: nested loops over heads and tokens around cells of `cellBytes`. Where the
 * names of two tiles are equal, byte `i` of their cells holds the same element (K first, then V,
 * for plain caches).
 */
export interface Tile {
  readonly name: string;
  readonly offset: number;
  readonly lengthBytes: number;
  readonly axes: readonly TileAxis[];
  readonly cellBytes: number;
  /** Number of the first byte of a cell: a share of a state begins within it. */
  readonly cellBegin: number;
}

/** The contents of a block, in order. Bytes that no tile covers are padding. */
export interface BlockContents {
  readonly tiles: readonly Tile[];
  /** Tokens in the block; 1 for blocks without tokens. */
  readonly tokens: number;
  /**
   * Tokens that a step along the token axis stands for: 1, or a whole block where the order of
   * tokens is not known.
   */
  readonly tokensPerStep: number;
  /** Kernel blocks that the block spans. */
  readonly kernelBlocks: number;
  /**
   * The contents may reach into the padding after the kernel blocks: a state uses the whole page.
   */
  readonly usesPadding: boolean;
}

/** The contents of one byte, and the number of bytes that continue in the same way. */
export interface BytePlace {
  readonly tile: Tile;
  readonly head: number;
  readonly token: number;
  readonly cellByte: number;
  /** Bytes until the cell ends, and until the innermost loop does. */
  readonly cellRest: number;
  readonly runBytes: number;
  readonly runAxis: "head" | "token" | "cell";
}

/**
 * By layout: whether the loop over heads is outside the loop over tokens, within a block of one
 * layer.
 */
const HEAD_OUTSIDE: Readonly<Record<string, boolean | undefined>> = {
  LBHNC: true,
  BLHNC: true,
  LBNHC: false,
  BLNHC: false,
};

export interface BlockQuestion {
  readonly rank: RankGeometry;
  readonly region: RegionGeometry;
  /** Bytes of a block that belong to the region's cache; a packed row has others beside it. */
  readonly lengthBytes: number;
  readonly group: number;
  readonly model: ModelGeometry;
  readonly other: RankGeometry;
  /** The attention backend's order within a head, where it is one of its own. */
  readonly ownOrder: string | undefined;
}

/**
 * The contents of a block by the letters of its layout. Undefined when the block does not divide as
 * the layout says.
 */
export function contentsOfBlock(question: BlockQuestion): BlockContents | undefined {
  const { rank, group, model, lengthBytes } = question;
  const kind = cacheSemantics(model.groups[group] ?? "");
  if (kind === undefined) return undefined;
  if (kind.sharing === "state") return stateContents(rank, question.other);
  if (kind.lists === "last") {
    const whole = tile("a whole block", lengthBytes, lengthBytes, [
      { axis: "token", begin: 0, size: 1 },
    ]);
    return { tiles: [whole], tokens: 1, tokensPerStep: 1, kernelBlocks: 1, usesPadding: false };
  }
  return attentionContents(question);
}

function attentionContents(question: BlockQuestion): BlockContents | undefined {
  const { rank, region, lengthBytes, group, model, other, ownOrder } = question;
  const heads = headsInRegion(rank, region, group, model);
  const tokens = tokensInBlock(rank, group, other);
  if (!Number.isInteger(tokens)) return undefined;
  const head: TileAxis = { axis: "head", ...heads };
  const headOutside = heads.size === 1 ? true : HEAD_OUTSIDE[rank.layout];
  const whole: TileAxis = { axis: "token", begin: 0, size: 1 };
  // Cells that stand for several tokens each, of compressed latents.
  const compressed = heads.size === 1 && lengthBytes % tokens !== 0;
  if (headOutside === undefined || (ownOrder !== undefined && !headOutside) || compressed) {
    // The heads of a layer are not together, or their order is unknown: the block is known as a
    // whole only.
    const layout = heads.size === 1 ? "any layout" : rank.layout;
    const name = `a whole block of ${layout} ${ownOrder ?? "plain"}, ${heads.size} heads from ${heads.begin}, ${tokens} tokens`;
    return {
      tiles: [tile(name, lengthBytes, lengthBytes, [whole])],
      tokens,
      tokensPerStep: tokens,
      kernelBlocks: 1,
      usesPadding: false,
    };
  }
  if (ownOrder !== undefined) {
    const cellBytes = lengthBytes / heads.size;
    if (!Number.isInteger(cellBytes)) return undefined;
    const name = `${ownOrder}, ${tokens} tokens`;
    return {
      tiles: [tile(name, lengthBytes, cellBytes, [head, whole])],
      tokens,
      tokensPerStep: tokens,
      kernelBlocks: 1,
      usesPadding: false,
    };
  }
  const cellBytes = lengthBytes / (heads.size * tokens);
  if (!Number.isInteger(cellBytes)) return undefined;
  const token: TileAxis = { axis: "token", begin: 0, size: tokens };
  const axes = headOutside ? [head, token] : [token, head];
  return {
    tiles: [tile("plain", lengthBytes, cellBytes, axes)],
    tokens,
    tokensPerStep: 1,
    kernelBlocks: 1,
    usesPadding: false,
  };
}

/** A state: its projections and the recurrent part, each cut evenly over the ranks on its own. */
function stateContents(rank: RankGeometry, other: RankGeometry): BlockContents | undefined {
  const own = rank.stateSpace;
  if (own === undefined) return undefined;
  const given = other.stateSpace?.convProjectionBytes;
  // A handshake has sums only. Missing projections are those of the other side, scaled to this
  // side's number of ranks.
  const projections = own.convProjectionBytes ??
    given?.map((bytes) => (bytes * other.tpSize) / rank.tpSize) ?? [own.convBytes];
  if (projections.some((bytes) => !Number.isInteger(bytes))) return undefined;
  let offset = 0;
  const tiles = [...projections, own.recurrentBytes].map((bytes, index, all): Tile => {
    const name = index === all.length - 1 ? "recurrent state" : `convolution ${index}`;
    const part = { ...tile(name, bytes, bytes, []), offset, cellBegin: rank.tpRank * bytes };
    offset += bytes;
    return part;
  });
  return {
    tiles,
    tokens: 1,
    tokensPerStep: 1,
    kernelBlocks: rank.physicalBlocksPerLogical,
    usesPadding: true,
  };
}

function tile(
  name: string,
  lengthBytes: number,
  cellBytes: number,
  axes: readonly TileAxis[],
): Tile {
  // Cells of different sizes are different, except those of a state, which a rank has a share of.
  const named = axes.length === 0 ? name : `${name}, cells of ${cellBytes}`;
  return { name: named, offset: 0, lengthBytes, cellBytes, axes, cellBegin: 0 };
}

/** The contents of the byte at an offset of the block; undefined in padding. */
export function placeAt(contents: BlockContents, offset: number): BytePlace | undefined {
  const found = contents.tiles.find(
    (one) => offset >= one.offset && offset < one.offset + one.lengthBytes,
  );
  if (found === undefined) return undefined;
  const into = offset - found.offset;
  const cell = Math.floor(into / found.cellBytes);
  const inCell = into - cell * found.cellBytes;
  const at = { head: 0, token: 0 };
  let rest = cell;
  let runAxis: BytePlace["runAxis"] = "cell";
  const cellRest = found.cellBytes - inCell;
  let runBytes = cellRest;
  for (let index = found.axes.length - 1; index >= 0; index--) {
    const loop = found.axes[index] as TileAxis;
    const position = rest % loop.size;
    rest = (rest - position) / loop.size;
    at[loop.axis] = (loop.begin + position) * (loop.axis === "token" ? contents.tokensPerStep : 1);
    if (index === found.axes.length - 1 && loop.size > 1) {
      runAxis = loop.axis;
      runBytes += (loop.size - 1 - position) * found.cellBytes;
    }
  }
  return { tile: found, ...at, cellByte: found.cellBegin + inCell, cellRest, runBytes, runAxis };
}

/** Bytes of a block of a region. */
export function blockBytes(
  region: RegionGeometry,
  { kernelBlocks, usesPadding }: Pick<BlockContents, "kernelBlocks" | "usesPadding">,
): number {
  return (
    region.blockStrideBytes * (kernelBlocks - 1) +
    (usesPadding ? region.blockStrideBytes : region.blockLengthBytes)
  );
}

/** The first byte after `offset` that is not padding; the end of the block where there is none. */
export function afterPadding(contents: BlockContents, offset: number, lengthBytes: number): number {
  const begins = contents.tiles.map((one) => one.offset).filter((begin) => begin > offset);
  return Math.min(lengthBytes, ...begins);
}
