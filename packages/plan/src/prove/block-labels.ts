import type { RegionGeometry } from "../geometry/rank-geometry.js";
import type { MovedBytes } from "../request/receive-pass.js";
import type { HeadRange } from "./cache-semantics.js";

/** What consecutive bytes of a block are: those of a cell from `byte` on. */
export interface Label {
  readonly at: number;
  readonly lengthBytes: number;
  /** The cache, and what its cells are. Equal names mean equal bytes. */
  readonly cell: string;
  /** Counted over the whole model. */
  readonly head: number;
  readonly token: number;
  readonly byte: number;
}

export interface Tile {
  readonly cache: string;
  /** What is in a cell, where it is not K and V of one head and token. */
  readonly kind: string;
  readonly offset: number;
  readonly cellBytes: number;
  /** A share of a state begins within a cell. */
  readonly firstByte: number;
  readonly heads: HeadRange;
  readonly steps: number;
  readonly order: "head-major" | "token-major";
}

/** Bytes that no tile covers are padding. */
export interface BlockContents {
  readonly tiles: readonly Tile[];
  readonly tokens: number;
  /** Tokens of a step: 1, or a whole block of unknown order. */
  readonly tokensPerStep: number;
  readonly kernelBlocks: number;
  /** A state uses the whole page, padding included. */
  readonly usesPadding: boolean;
}

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

export function inOrder<T extends { readonly at: number }>(labels: readonly T[]): readonly T[] {
  return [...labels].sort((one, other) => one.at - other.at);
}

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
 * The first byte of `want` that differs in `found`, the labels between its start and end; undefined
 * where none does.
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

export function blockBytes(
  region: RegionGeometry,
  { kernelBlocks, usesPadding }: Pick<BlockContents, "kernelBlocks" | "usesPadding">,
): number {
  const last = usesPadding ? region.blockStrideBytes : region.blockLengthBytes;
  return region.blockStrideBytes * (kernelBlocks - 1) + last;
}
