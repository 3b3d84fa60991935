import type { BlockOrder } from "../geometry/layout.js";
import type { Piece, SourcePosition } from "../kinds/cache-kind.js";

/** A block of heads and tokens on one side. */
export interface AttentionSide {
  readonly blockBytes: number;
  readonly heads: number;
  readonly tokens: number;
  readonly order: BlockOrder;
}

/**
 * A region of heads and tokens on both sides, and the heads that a source and the local rank share.
 */
export interface AttentionShape {
  readonly local: AttentionSide;
  readonly remote: AttentionSide;
  /** Heads that one source fills: the local heads, or an equal share of them. */
  readonly sharedHeads: number;
  /** The first of the shared heads in the local block, for a source. */
  localHead(source: SourcePosition): number;
  readonly remoteHead: number;
  /**
   * The groups of the region have different numbers of tokens or heads in a block, so a piece of
   * one group does not fit another. `tokens` is then that of the first group, and `heads` the
   * highest number.
   */
  readonly isMixed?: boolean | undefined;
  /** The bytes of a block are not heads × tokens × cells: it is only moved whole. */
  readonly isWhole?: boolean | undefined;
}

/**
 * The numbers of parts into which kernel blocks are cut, so that a local and a remote part hold
 * equally many tokens.
 */
export interface BlockParts {
  readonly localParts: number;
  readonly remoteParts: number;
}

/** The way in which blocks are cut: into parts of the engine's kernel block, or token by token. */
export interface Cuts {
  /** Of a kernel block of the engine. */
  readonly parts: BlockParts;
  readonly tokenByToken: boolean;
}

/**
 * Parts of blocks with these numbers of tokens. Token by token, each group's blocks have as many
 * parts as tokens; otherwise one ratio serves all groups.
 */
export function partsOfBlocks(
  { parts, tokenByToken }: Cuts,
  { local, remote }: { readonly local: number; readonly remote: number },
): BlockParts {
  return tokenByToken ? { localParts: local, remoteParts: remote } : parts;
}

/** `partsOfBlocks` for a region. */
export function partsOfShape(cuts: Cuts, { local, remote }: AttentionShape): BlockParts {
  return partsOfBlocks(cuts, { local: local.tokens, remote: remote.tokens });
}

const isWhole = (side: AttentionSide, sharedHeads: number) => side.heads === sharedHeads;

/** Whether the shared heads of one part of a block are one stretch of bytes. */
function isContiguous(side: AttentionSide, sharedHeads: number, parts: number): boolean {
  if (parts === 1 && (side.order !== "token-major" || isWhole(side, sharedHeads))) return true;
  if (side.heads === 1 && side.order !== "opaque") return true;
  return side.order === "token-major" && isWhole(side, sharedHeads);
}

/**
 * Whether a plain copy puts parts in order: they are contiguous on both sides, and in the same
 * order.
 */
export function isPlainCopy(
  shape: AttentionShape,
  { localParts, remoteParts }: BlockParts,
): boolean {
  const { local, remote, sharedHeads } = shape;
  if (
    !isContiguous(local, sharedHeads, localParts) ||
    !isContiguous(remote, sharedHeads, remoteParts)
  )
    return false;
  return sharedHeads === 1 || local.order === remote.order;
}

/**
 * Whether the direct form cuts blocks token by token: only where one side keeps the several heads
 * of a token together.
 */
export function isTokenByToken({ local, remote, sharedHeads }: AttentionShape): boolean {
  const tokenMajor = (side: AttentionSide) => side.order === "token-major" && side.heads > 1;
  if (!tokenMajor(local) && !tokenMajor(remote)) return false;
  return !(
    isWhole(local, sharedHeads) &&
    isWhole(remote, sharedHeads) &&
    local.order === remote.order
  );
}

/** One piece: the shared heads of a part, in the remote order. */
export function copiedPiece(shape: AttentionShape, { localParts, remoteParts }: BlockParts): Piece {
  const { local, remote, sharedHeads } = shape;
  const partBytes = {
    local: local.blockBytes / localParts,
    remote: remote.blockBytes / remoteParts,
  };
  const headBytes = partBytes.local / local.heads;
  return {
    name: "",
    unit: "kernel-block",
    localParts,
    remoteParts,
    lengthBytes: headBytes * sharedHeads,
    local: (source) => ({
      offsetBytes: shape.localHead(source) * headBytes,
      partStrideBytes: partBytes.local,
    }),
    remote: () => ({
      offsetBytes: shape.remoteHead * headBytes,
      partStrideBytes: partBytes.remote,
    }),
  };
}

/** Pieces that land in their final place for any order on either side. */
export function directPieces(shape: AttentionShape, parts: BlockParts): readonly Piece[] {
  if (isPlainCopy(shape, parts)) return [copiedPiece(shape, parts)];
  const { local, remote, sharedHeads } = shape;
  const cellBytes = local.blockBytes / (local.heads * local.tokens);
  const partTokens = local.tokens / parts.localParts;
  const together = local.order === "token-major" && remote.order === "token-major";
  const runs = together ? [{ first: 0, heads: sharedHeads }] : [];
  for (let head = 0; head < sharedHeads && !together; head++) runs.push({ first: head, heads: 1 });
  const place = (side: AttentionSide, head: number) =>
    side.order === "token-major"
      ? { offsetBytes: head * cellBytes, partStrideBytes: partTokens * side.heads * cellBytes }
      : { offsetBytes: head * side.tokens * cellBytes, partStrideBytes: partTokens * cellBytes };
  return runs.map(({ first, heads }): Piece => {
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
