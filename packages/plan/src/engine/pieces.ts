import type { TpMapping } from "@kv/topology";
import { type BlockOrder, orderOfBlock } from "../geometry/block-format.js";
import type { ModelGeometry, RankGeometry, RegionGeometry } from "../geometry/rank-geometry.js";
import type { Piece, SourcePosition } from "../kinds/cache-kind.js";
import {
  attentionGroups,
  groupsOfRegion,
  headsInBlock,
  headsInRegion,
  headsOfGroup,
  kernelTokens,
  kindOf,
  whyWhole,
} from "./region-heads.js";

/**
 * How bytes get into local order. `copy`: they land in place. `permute`: smaller remote blocks land
 * one after another, and the receive pass puts heads and tokens in order. `direct`: pieces of
 * blocks land in place, without a pass.
 */
export type TransferForm = "copy" | "permute" | "direct";

export interface RegionPair {
  readonly index: number;
  readonly region: RegionGeometry;
  readonly remoteRegion: RegionGeometry;
  readonly attentionGroups: readonly number[];
  readonly stateGroups: readonly number[];
  /**
   * The most of its groups, over the whole model; undefined where every rank holds the same bytes.
   */
  readonly heads: number | undefined;
  readonly mapping: TpMapping;
}

export interface PairContext {
  readonly local: RankGeometry;
  readonly remote: RankGeometry;
  readonly model: ModelGeometry;
  mapping(heads: number | undefined): TpMapping;
}

export interface RegionPiece {
  readonly pair: RegionPair;
  readonly piece: Piece;
  readonly groups: readonly number[];
  readonly ranks: readonly number[];
}

export interface AttentionSide {
  readonly blockBytes: number;
  readonly heads: number;
  readonly tokens: number;
  readonly order: BlockOrder;
}

export interface AttentionShape {
  readonly local: AttentionSide;
  readonly remote: AttentionSide;
  /** Heads that one source fills: the local ones, or an equal share. */
  readonly sharedHeads: number;
  localHead(source: SourcePosition): number;
  readonly remoteHead: number;
  /**
   * The region's groups differ in tokens or heads per block, so no piece fits all. `tokens` is the
   * first group's, `heads` the highest.
   */
  readonly isMixed?: boolean | undefined;
  /** The block is not heads × tokens × cells, so it only moves whole. */
  readonly isWhole?: boolean | undefined;
}

/** A local and a remote part hold equally many tokens. */
export interface BlockParts {
  readonly localParts: number;
  readonly remoteParts: number;
}

/** Blocks are cut into parts of the engine's kernel block, or token by token. */
export interface Cuts {
  readonly parts: BlockParts;
  readonly tokenByToken: boolean;
}

export function regionPair(
  context: PairContext,
  index: number,
  region: RegionGeometry,
  remoteRegion: RegionGeometry,
): RegionPair {
  const { local, model } = context;
  const heads = headsInRegion(local, region, model);
  return {
    index,
    region,
    remoteRegion,
    attentionGroups: attentionGroups(local, region, model),
    stateGroups: groupsOfRegion(local, region, model).filter(
      (group) => kindOf(model, group).sharding === "state",
    ),
    heads,
    mapping: context.mapping(heads),
  };
}

export function attentionShape(
  { local, remote, model }: PairContext,
  { region, remoteRegion, heads, mapping, attentionGroups: groups }: RegionPair,
): AttentionShape {
  const sideOf = (rank: RankGeometry, blockBytes: number, tokens: number): AttentionSide => {
    const inBlock = headsInBlock(rank, heads);
    return { blockBytes, heads: inBlock, tokens, order: orderOfBlock(rank.layout, inBlock) };
  };
  const tokens = kernelTokens(local, groups[0] ?? 0);
  const remoteTokens = (tokens * remote.kernelBlockSize) / local.kernelBlockSize;
  const mine = sideOf(local, region.blockLengthBytes, tokens);
  const theirs = sideOf(remote, remoteRegion.blockLengthBytes, remoteTokens);
  // In token-major blocks, a share of each token's heads is the same bytes for any number of heads.
  const rows = mine.order === "token-major" && theirs.order === "token-major";
  const isMixed = groups.some(
    (group) =>
      kernelTokens(local, group) !== tokens ||
      (!rows && headsOfGroup(region, group, model) !== heads),
  );
  const sharedHeads = heads === undefined ? 1 : mine.heads / mapping.attentionRanks.length;
  return {
    local: mine,
    remote: theirs,
    sharedHeads,
    localHead: ({ tpRank }) => headSlot(mapping, tpRank, heads ?? 1, remote) * sharedHeads,
    remoteHead: mapping.rankOffsetFactor * mine.heads,
    isMixed: isMixed || undefined,
    isWhole: whyWhole(local, remote, region, model) !== undefined || undefined,
  };
}

/**
 * The slot of the rank's head, even for a replica. A replicated cache has one slot, as every source
 * fills whole blocks.
 */
function headSlot(mapping: TpMapping, tpRank: number, heads: number, remote: RankGeometry): number {
  const headOf = (rank: number) => Math.floor((rank * heads) / remote.tpSize);
  const slot = mapping.attentionRanks.findIndex((rank) => headOf(rank) === headOf(tpRank));
  return Math.max(0, slot);
}

/** Pieces are in the order of the tables: attention region by region, then state. */
export function piecesOf(
  { local, remote, model }: PairContext,
  pairs: readonly RegionPair[],
  shapes: readonly (AttentionShape | undefined)[],
  { form, ...cuts }: { form: TransferForm } & Cuts,
): readonly RegionPiece[] {
  const attention = pairs.flatMap((pair, index) => {
    const shape = shapes[index];
    if (shape === undefined) return [];
    const parts = partsOfShape(cuts, shape);
    const pieces = form === "direct" ? directPieces(shape, parts) : [copiedPiece(shape, parts)];
    const ranks = pair.mapping.attentionRanks;
    return pieces.map((piece) => ({ pair, piece, groups: pair.attentionGroups, ranks }));
  });
  const state = pairs.flatMap((pair) => {
    const { region, remoteRegion, stateGroups: groups } = pair;
    const [group] = groups;
    if (group === undefined) return [];
    const pieces = kindOf(model, group).pieces?.({ local, remote, region, remoteRegion }) ?? [];
    const ranks = pair.mapping.sourceRanksPerGroup[group] ?? [];
    return pieces.map((piece) => ({ pair, piece, groups, ranks }));
  });
  return [...attention, ...state];
}

/** Token by token, a block has as many parts as tokens; otherwise one ratio serves all groups. */
export function partsOfBlocks(
  { parts, tokenByToken }: Cuts,
  localTokens: number,
  remoteTokens: number,
): BlockParts {
  return tokenByToken ? { localParts: localTokens, remoteParts: remoteTokens } : parts;
}

export function partsOfShape(cuts: Cuts, { local, remote }: AttentionShape): BlockParts {
  return partsOfBlocks(cuts, local.tokens, remote.tokens);
}

/** Whether the shared heads of one part are one stretch of bytes. */
function isContiguous({ order, heads }: AttentionSide, sharedHeads: number, parts: number) {
  if (order === "token-major") return heads === 1 || heads === sharedHeads;
  return parts === 1 || (heads === 1 && order === "head-major");
}

export function isPlainCopy(
  { local, remote, sharedHeads }: AttentionShape,
  { localParts, remoteParts }: BlockParts,
): boolean {
  return (
    isContiguous(local, sharedHeads, localParts) &&
    isContiguous(remote, sharedHeads, remoteParts) &&
    (sharedHeads === 1 || local.order === remote.order)
  );
}

export function isTokenByToken({ local, remote, sharedHeads }: AttentionShape): boolean {
  const sides = [local, remote];
  if (!sides.some(({ order, heads }) => order === "token-major" && heads > 1)) return false;
  return local.order !== remote.order || sides.some(({ heads }) => heads !== sharedHeads);
}

/** The shared heads of a part, in the remote order. */
function copiedPiece(shape: AttentionShape, parts: BlockParts): Piece {
  const { local, remote, sharedHeads, remoteHead } = shape;
  const partBytes = local.blockBytes / parts.localParts;
  const headBytes = partBytes / local.heads;
  const place = (head: number, partStrideBytes: number) => ({
    offsetBytes: head * headBytes,
    partStrideBytes,
  });
  return {
    name: "",
    unit: "kernel-block",
    ...parts,
    lengthBytes: headBytes * sharedHeads,
    local: (source) => place(shape.localHead(source), partBytes),
    remote: () => place(remoteHead, remote.blockBytes / parts.remoteParts),
  };
}

export function directPieces(shape: AttentionShape, parts: BlockParts): readonly Piece[] {
  if (isPlainCopy(shape, parts)) return [copiedPiece(shape, parts)];
  const { local, remote, sharedHeads } = shape;
  const cellBytes = local.blockBytes / (local.heads * local.tokens);
  const partTokens = local.tokens / parts.localParts;
  const place = ({ order, heads, tokens }: AttentionSide, head: number) => {
    const [headCells, tokenCells] = order === "token-major" ? [1, heads] : [tokens, 1];
    return {
      offsetBytes: head * headCells * cellBytes,
      partStrideBytes: partTokens * tokenCells * cellBytes,
    };
  };
  const together = local.order === "token-major" && remote.order === "token-major";
  const heads = together ? sharedHeads : 1;
  return Array.from({ length: sharedHeads / heads }, (_, index): Piece => {
    const first = index * heads;
    return {
      name: heads === sharedHeads ? "" : `head ${first}`,
      unit: "kernel-block",
      ...parts,
      lengthBytes: heads * partTokens * cellBytes,
      local: (source) => place(local, shape.localHead(source) + first),
      remote: () => place(remote, shape.remoteHead + first),
    };
  });
}
