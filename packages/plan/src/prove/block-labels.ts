import type { ModelGeometry, RankGeometry, RegionGeometry } from "../geometry/rank-geometry.js";
import type { MovedBytes } from "../receive/apply-receive-pass.js";
import { cacheSemantics, type HeadRange, headsInRegion, tokensInBlock } from "./cache-semantics.js";

/** What some consecutive bytes of a block are: byte `byte` and the following ones of a cell. */
export interface Label {
  readonly at: number;
  readonly lengthBytes: number;
  /** Name of the cache, and what its cells are. Equal cells have the same bytes in them. */
  readonly cell: string;
  /** Counted over the whole model. */
  readonly head: number;
  readonly token: number;
  readonly byte: number;
}

/** A stretch of a block: cells of one cache, of heads × steps along the tokens. */
export interface Tile {
  readonly cache: string;
  /** What is in a cell, where it is not K and V of one head and token. */
  readonly kind: string;
  readonly offset: number;
  readonly cellBytes: number;
  /** Number of the first byte of a cell: a share of a state begins within it. */
  readonly firstByte: number;
  readonly heads: HeadRange;
  readonly steps: number;
  readonly order: "head-major" | "token-major";
}

/** The contents of a block. Bytes that no tile covers are padding. */
export interface BlockContents {
  readonly tiles: readonly Tile[];
  readonly tokens: number;
  /** Tokens of a step: 1, or a whole block where the order of tokens is not known. */
  readonly tokensPerStep: number;
  readonly kernelBlocks: number;
  /** A state uses the whole page, the padding after its kernel blocks included. */
  readonly usesPadding: boolean;
}

/** The labels of a block, in the order of its bytes. */
export function labelsOf({ tiles, tokensPerStep }: BlockContents): readonly Label[] {
  const labels = tiles.flatMap((tile) => {
    const { heads, steps, cellBytes } = tile;
    // Shares of a state are cells of other sizes on other ranks.
    const cell = `${tile.cache}: ${tile.kind}`;
    return Array.from({ length: heads.size * steps }, (_, index): Label => {
      const [inner, outer] = tile.order === "head-major" ? [steps, 1] : [1, heads.size];
      const head = Math.floor(index / inner) % heads.size;
      const step = Math.floor(index / outer) % steps;
      return {
        at: tile.offset + index * cellBytes,
        lengthBytes: cellBytes,
        cell,
        head: heads.begin + head,
        token: step * tokensPerStep,
        byte: tile.firstByte,
      };
    });
  });
  return inOrder(labels);
}

/** Labels in the order of their bytes. */
export function inOrder<T extends { readonly at: number }>(labels: readonly T[]): readonly T[] {
  return [...labels].sort((one, other) => one.at - other.at);
}

/** The labels of bytes that move, at their new place; `tokens` are added to each. */
export function moved(
  labels: readonly Label[],
  { from, at, lengthBytes }: MovedBytes,
  tokens = 0,
): Label[] {
  let [first, behind] = [0, labels.length];
  while (first < behind) {
    const middle = (first + behind) >> 1;
    const label = labels[middle] as Label;
    if (label.at + label.lengthBytes <= from) first = middle + 1;
    else behind = middle;
  }

  const found: Label[] = [];
  for (let index = first; index < labels.length; index++) {
    const label = labels[index] as Label;
    const begin = Math.max(label.at, from);
    const end = Math.min(label.at + label.lengthBytes, from + lengthBytes);
    if (begin >= end) break;
    found.push({
      ...label,
      at: at + begin - from,
      lengthBytes: end - begin,
      token: label.token + tokens,
      byte: label.byte + begin - label.at,
    });
  }
  return found;
}

/**
 * The first byte of a label that is not the same byte of the same cell, and what is there;
 * undefined where all bytes are. `found` are the labels between the begin and the end of `want`.
 */
export function firstDifference(
  want: Label,
  found: readonly Label[],
): { readonly at: number; readonly byte: number; readonly got: Label | undefined } | undefined {
  let next = want.at;
  const byte = () => want.byte + next - want.at;
  for (const got of found) {
    if (got.at > next) break;
    const isSame = got.head === want.head && got.token === want.token && got.byte === byte();
    if (!isSame || got.cell !== want.cell) return { at: next, byte: byte(), got };
    next += got.lengthBytes;
  }
  return next < want.at + want.lengthBytes ? { at: next, byte: byte(), got: undefined } : undefined;
}

/** A question for the contents of the blocks of one region. */
export interface BlockQuestion {
  readonly rank: RankGeometry;
  readonly region: RegionGeometry;
  readonly group: number;
  readonly model: ModelGeometry;
  readonly other: RankGeometry;
  /** The attention backend's order within a head, where it is one of its own. */
  readonly ownOrder: string | undefined;
}

/**
 * The contents of a cache's page in a block, by the letters of its layout. Undefined when the page
 * does not divide as the layout says.
 */
export function contentsOfPage(
  question: BlockQuestion,
  { cache, offset, lengthBytes }: { cache: string; offset: number; lengthBytes: number },
): BlockContents | undefined {
  const { rank, region, group, model, other, ownOrder } = question;
  const kind = cacheSemantics(model.groups[group] ?? "");
  if (kind?.sharing === "state") return stateContents(rank, other, cache);
  const plain = { kernelBlocks: 1, usesPadding: false };
  const whole = { cache, offset, firstByte: 0, heads: { begin: 0, size: 1 }, steps: 1 };
  const order = "head-major";
  if (kind === undefined) return undefined;
  if (kind.lists === "last") {
    const tile = { ...whole, kind: "a whole block", cellBytes: lengthBytes, order } as const;
    return { tiles: [tile], tokens: 1, tokensPerStep: 1, ...plain };
  }

  const heads = headsInRegion(rank, region, group, model);
  const tokens = tokensInBlock(rank, group, other);
  if (!Number.isInteger(tokens)) return undefined;
  const known = heads.size === 1 ? "head-major" : orderOf(rank.layout);
  const inCells = (steps: number, name: string, all: HeadRange): BlockContents | undefined => {
    const cellBytes = lengthBytes / (all.size * steps);
    if (!Number.isInteger(cellBytes)) return undefined;
    const tile = { ...whole, heads: all, steps, order: known ?? order, cellBytes };
    const tiles = [{ ...tile, kind: `${name}, cells of ${cellBytes}` }];
    return { tiles, tokens, tokensPerStep: tokens / steps, ...plain };
  };
  // Cells that stand for several tokens each, of compressed latents.
  const isCompressed = heads.size === 1 && lengthBytes % tokens !== 0;
  if (known === undefined || isCompressed || (ownOrder !== undefined && known !== "head-major")) {
    // The heads of a layer are not together, or their order is unknown: the block is known as a
    // whole only.
    const layout = heads.size === 1 ? "any layout" : rank.layout;
    const what = `${heads.size} heads from ${heads.begin}, ${tokens} tokens`;
    return inCells(1, `a block of ${layout} ${ownOrder ?? "plain"}, ${what}`, whole.heads);
  }
  if (ownOrder !== undefined) return inCells(1, `${ownOrder}, ${tokens} tokens`, heads);
  return inCells(tokens, "plain", heads);
}

function orderOf(layout: string): Tile["order"] | undefined {
  if (layout === "LBHNC" || layout === "BLHNC") return "head-major";
  return layout === "LBNHC" || layout === "BLNHC" ? "token-major" : undefined;
}

/** A state: its projections and the recurrent part, each cut evenly over the ranks on its own. */
function stateContents(
  rank: RankGeometry,
  other: RankGeometry,
  cache: string,
): BlockContents | undefined {
  const own = rank.stateSpace;
  if (own === undefined) return undefined;
  // A handshake has sums only. Missing projections are those of the other side, scaled to this
  // side's number of ranks.
  const given = other.stateSpace?.convProjectionBytes;
  const projections = own.convProjectionBytes ??
    given?.map((bytes) => (bytes * other.tpSize) / rank.tpSize) ?? [own.convBytes];
  if (!projections.every(Number.isInteger)) return undefined;

  let end = 0;
  const tiles = [...projections, own.recurrentBytes].map((cellBytes, index): Tile => {
    const kind = index === projections.length ? "recurrent state" : `convolution ${index}`;
    const offset = end;
    end += cellBytes;
    const [firstByte, heads] = [rank.tpRank * cellBytes, { begin: 0, size: 1 }];
    return { cache, kind, offset, cellBytes, firstByte, heads, steps: 1, order: "head-major" };
  });
  const kernelBlocks = rank.physicalBlocksPerLogical;
  return { tiles, tokens: 1, tokensPerStep: 1, kernelBlocks, usesPadding: true };
}

/** Bytes of a block of a region. */
export function blockBytes(
  region: RegionGeometry,
  { kernelBlocks, usesPadding }: Pick<BlockContents, "kernelBlocks" | "usesPadding">,
): number {
  const last = usesPadding ? region.blockStrideBytes : region.blockLengthBytes;
  return region.blockStrideBytes * (kernelBlocks - 1) + last;
}
