import type { TpMapping } from "@kv/topology";
import { orderOfBlock } from "../geometry/layout.js";
import type { ModelGeometry, RankGeometry, RegionGeometry } from "../geometry/rank-geometry.js";
import type { Piece } from "../kinds/cache-kind.js";
import { cacheKind } from "../kinds/registry.js";
import {
  type AttentionShape,
  type Cuts,
  copiedPiece,
  directPieces,
  partsOfShape,
} from "./attention-pieces.js";
import {
  groupsOfRegion,
  headsInBlock,
  headsInRegion,
  headsOfGroup,
  kernelTokens,
  whyWhole,
} from "./region-heads.js";
import type { TransferForm } from "./transfer-form.js";

/** One region on both sides, with its groups and heads. */
export interface RegionPair {
  readonly index: number;
  readonly region: RegionGeometry;
  readonly remoteRegion: RegionGeometry;
  /** Groups of heads and tokens, or of whole blocks, that have blocks in the region. */
  readonly attentionGroups: readonly number[];
  readonly stateGroups: readonly number[];
  /**
   * KV heads of the whole model: the most of its groups; undefined where every rank holds the same
   * bytes.
   */
  readonly heads: number | undefined;
  readonly mapping: TpMapping;
}

/** The two ranks of a plan, and their mappings. */
export interface PairContext {
  readonly local: RankGeometry;
  readonly remote: RankGeometry;
  readonly model: ModelGeometry;
  mapping(heads: number | undefined): TpMapping;
}

/** A piece of a region: a segment before it has a place in the tables. */
export interface RegionPiece {
  readonly pair: RegionPair;
  readonly piece: Piece;
  readonly groups: readonly number[];
  readonly ranks: readonly number[];
}

/** One region with its groups, heads and mapping. */
export function regionPair(
  context: PairContext,
  index: number,
  region: RegionGeometry,
  remoteRegion: RegionGeometry,
): RegionPair {
  const { local, model } = context;
  const groups = groupsOfRegion(local, region, model);
  const isState = (group: number) => cacheKind(model.groups[group] ?? "").sharding === "state";
  const heads = headsInRegion(local, region, model);
  return {
    index,
    region,
    remoteRegion,
    attentionGroups: groups.filter((group) => !isState(group)),
    stateGroups: groups.filter(isState),
    heads,
    mapping: context.mapping(heads),
  };
}

/**
 * The shape of a region's blocks on both sides, and the heads that a source and the local rank
 * share.
 */
export function attentionShape(
  { local, remote, model }: PairContext,
  pair: RegionPair,
): AttentionShape {
  const { region, remoteRegion, heads, mapping } = pair;
  const group = pair.attentionGroups[0] ?? 0;
  const sides = [
    [local, region],
    [remote, remoteRegion],
  ] as const;
  const remoteTokens =
    (kernelTokens(local, group) * remote.kernelBlockSize) / local.kernelBlockSize;
  const [one, other] = sides.map(([rank, { blockLengthBytes }]) => ({
    blockBytes: blockLengthBytes,
    heads: headsInBlock(rank, heads),
    tokens: rank === local ? kernelTokens(local, group) : remoteTokens,
    order: orderOfBlock(rank.layout, headsInBlock(rank, heads)),
  })) as [AttentionShape["local"], AttentionShape["local"]];
  const ranks = mapping.attentionRanks;
  const tokens = new Set(pair.attentionGroups.map((each) => kernelTokens(local, each)));
  // In token-major blocks an equal share of each token's heads is the same bytes for any number of
  // heads.
  const rows = one.order === "token-major" && other.order === "token-major";
  const unlikeHeads =
    !rows && pair.attentionGroups.some((each) => headsOfGroup(region, each, model) !== heads);
  const sharedHeads = heads === undefined ? 1 : one.heads / ranks.length;
  return {
    local: one,
    remote: other,
    sharedHeads,
    localHead: ({ tpRank }) => headSlot(mapping, tpRank, heads ?? 1, remote) * sharedHeads,
    remoteHead: mapping.rankOffsetFactor * one.heads,
    isMixed: tokens.size > 1 || unlikeHeads || undefined,
    isWhole: whyWhole(local, remote, region, model) !== undefined || undefined,
  };
}

/**
 * The pieces of all regions, in the order of the tables: attention region by region, then state
 * region by region.
 */
export function piecesOf(
  context: PairContext,
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
    return pieces.map(
      (piece): RegionPiece => ({ pair, piece, groups: pair.attentionGroups, ranks }),
    );
  });
  const state = pairs.flatMap((pair) =>
    pair.stateGroups.slice(0, 1).flatMap((group) => {
      const kind = cacheKind(context.model.groups[group] ?? "");
      const { local, remote } = context;
      const { region, remoteRegion } = pair;
      const pieces = kind.pieces?.({ local, remote, region, remoteRegion }) ?? [];
      const ranks = pair.mapping.sourceRanksPerGroup[group] ?? [];
      return pieces.map((piece): RegionPiece => ({ pair, piece, groups: pair.stateGroups, ranks }));
    }),
  );
  return [...attention, ...state];
}

/**
 * The local share that a remote rank fills: the slot of its head, also where the rank is a replica.
 * A cache that is the same on all ranks has one slot: every source fills whole blocks, and under
 * DCP each source fills different blocks.
 */
function headSlot(mapping: TpMapping, tpRank: number, heads: number, remote: RankGeometry): number {
  const headOf = (rank: number) => Math.floor((rank * heads) / remote.tpSize);
  const slot = mapping.attentionRanks.findIndex((rank) => headOf(rank) === headOf(tpRank));
  return Math.max(0, slot);
}
