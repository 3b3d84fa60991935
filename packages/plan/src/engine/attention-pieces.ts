import type { Piece, SourcePosition } from "../kinds/cache-kind.js";
import type { BlockOrder } from "./engine-plan-types.js";

/** One side of a region that holds heads and tokens. */
export interface AttentionSide {
  readonly blockBytes: number;
  readonly heads: number;
  /** Tokens in a kernel block. */
  readonly tokens: number;
  readonly order: BlockOrder;
}

/** A region that holds heads and tokens, on both sides, and what of it a source and the local rank share. */
export interface AttentionShape {
  readonly local: AttentionSide;
  readonly remote: AttentionSide;
  /** Heads that one source fills: the local heads, or an equal share of them. */
  readonly sharedHeads: number;
  /** The first of the shared heads in the local block, for a source. */
  localHead(source: SourcePosition): number;
  /** The same in the remote block. */
  readonly remoteHead: number;
  /**
   * Groups share the region whose blocks hold unlike numbers of tokens or heads (`tokens` are those of the first, `heads` the most), so that
   * a piece of one is none of another.
   */
  readonly isMixed?: boolean;
}

/** Kernel blocks in equal parts of both sides' tokens. */
export interface BlockParts {
  readonly localParts: number;
  readonly remoteParts: number;
}

/** What is cut into such parts: the engine's blocks, or each token of any block. */
export interface Cuts {
  /** Of a kernel block of the engine. */
  readonly parts: BlockParts;
  readonly tokenByToken: boolean;
}

/** The parts of blocks of so many tokens. In equal parts all blocks go by one ratio; tokens are counted for each group's blocks anew. */
export function partsOfBlocks(
  { parts, tokenByToken }: Cuts,
  { local, remote }: { readonly local: number; readonly remote: number },
): BlockParts {
  return tokenByToken ? { localParts: local, remoteParts: remote } : parts;
}

/** `partsOfBlocks` of a region. */
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

/** Whether parts lie as they should by being copied: contiguous on both sides, and in one order. */
export function isPlainCopy(shape: AttentionShape, { localParts, remoteParts }: BlockParts): boolean {
  const { local, remote, sharedHeads } = shape;
  if (!isContiguous(local, sharedHeads, localParts) || !isContiguous(remote, sharedHeads, remoteParts))
    return false;
  return sharedHeads === 1 || local.order === remote.order;
}

/** Tokens of the pieces in the direct form: of several heads, token by token only where one side keeps a token's heads together. */
export function isTokenByToken({ local, remote, sharedHeads }: AttentionShape): boolean {
  const tokenMajor = (side: AttentionSide) => side.order === "token-major" && side.heads > 1;
  if (!tokenMajor(local) && !tokenMajor(remote)) return false;
  return !(isWhole(local, sharedHeads) && isWhole(remote, sharedHeads) && local.order === remote.order);
}

/** One piece: the shared heads of a part, in the order in which they lie at the remote. */
export function copiedPiece(shape: AttentionShape, { localParts, remoteParts }: BlockParts): Piece {
  const { local, remote, sharedHeads } = shape;
  const partBytes = { local: local.blockBytes / localParts, remote: remote.blockBytes / remoteParts };
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
    remote: () => ({ offsetBytes: shape.remoteHead * headBytes, partStrideBytes: partBytes.remote }),
  };
}

/** Pieces that land where they belong, whatever the order on either side. */
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
