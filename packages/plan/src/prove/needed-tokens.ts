import type { ModelGeometry, RankGeometry } from "../geometry/rank-geometry.js";
import type { RequestBlocks } from "../request/request-plan-types.js";
import { cacheSemantics, tokensInBlock } from "./cache-semantics.js";
import { fail } from "./proof-result.js";

/** Blocks of a group on one rank, and the token of the sequence with which each begins. */
export interface BlockTokens {
  /** Kernel blocks, or logical ones for a state. */
  readonly blocks: readonly number[];
  /** The token with which each block begins. */
  readonly tokens: readonly number[];
  /** The place of each block in `blocks`. */
  readonly position: ReadonlyMap<number, number>;
}

/**
 * The tokens that one group of a request needs, and their blocks on both sides, from the request
 * alone.
 */
export interface NeededTokens {
  /** KV cache group. */
  readonly group: number;
  /** Blocks to fill. */
  readonly local: BlockTokens;
  /** The remote's blocks, by source: the ranks of a DCP group have different ones. */
  readonly remotes: readonly BlockTokens[];
  /** The first token that the request needs. */
  readonly fromToken: number;
  /** One past the last. */
  readonly endToken: number;
}

/** The tokens that a group needs. `local` is the destination, `remotes` are the sources. */
export function neededTokens(
  group: number,
  local: RankGeometry,
  remotes: readonly RankGeometry[],
  model: ModelGeometry,
  blocks: RequestBlocks,
): NeededTokens {
  const localIds = blocks.localBlockIds[group] ?? [];
  const remoteIds = blocks.remoteBlockIds[group] ?? [];
  const what = `group ${group}`;
  const [remote] = remotes;
  const kind = cacheSemantics(model.groups[group] ?? "");
  if (kind === undefined)
    return fail("request-tables", `${what} is of the unknown kind "${model.groups[group]}"`);
  if (remote === undefined)
    return fail("request-tables", `${what}: the plan reads from no remote rank`);
  if (kind.lists === "last")
    return tokenlessBlocks(group, kind.sharing === "state", {
      local,
      remotes,
      localIds,
      remoteIds,
    });

  const logical = (rank: RankGeometry, other: RankGeometry) =>
    tokensInBlock(rank, group, other) * rank.physicalBlocksPerLogical;
  const [localTokens, remoteTokens] = [logical(local, remote), logical(remote, local)];
  const { numTokens } = blocks;
  const [localDcp, remoteDcp] = [local.dcpSize ?? 1, remote.dcpSize ?? 1];
  const windowed = kind.lists === "window";
  const [localBegin, remoteBegin] = listBegins(blocks, group, windowed, {
    local: { tokens: localTokens, length: localIds.length, dcp: localDcp },
    remote: { tokens: remoteTokens, length: remoteIds.length, dcp: remoteDcp },
  });
  const tokensOf = (
    rank: RankGeometry,
    dcp: number,
    begin: number,
    ids: readonly number[],
    perBlock: number,
  ) => {
    // The blocks of a sequence go in turn to the ranks of a DCP group.
    const first = begin + (rank.tpRank % dcp) * perBlock;
    return expanded(rank, ids, (index) => first + index * dcp * perBlock, perBlock);
  };
  return {
    group,
    local: blockTokens(
      `${what}: local`,
      tokensOf(local, localDcp, localBegin, localIds, localTokens),
    ),
    remotes: remotes.map((rank) =>
      blockTokens(
        `${what}: remote`,
        tokensOf(rank, remoteDcp, remoteBegin, remoteIds, remoteTokens),
      ),
    ),
    fromToken: Math.max(0, localBegin, remoteBegin),
    endToken: Math.min(
      numTokens ?? Number.POSITIVE_INFINITY,
      remoteBegin + remoteIds.length * remoteTokens * remoteDcp,
    ),
  };
}

interface BlockList {
  readonly tokens: number;
  readonly length: number;
  readonly dcp: number;
}

/**
 * The tokens with which both lists begin. The local list begins after `localComputedBlocks`, and
 * the remote list at the begin of the sequence. The lists of a window end where the sequence ends.
 */
function listBegins(
  { numTokens, localComputedBlocks }: RequestBlocks,
  group: number,
  windowed: boolean,
  { local, remote }: { readonly local: BlockList; readonly remote: BlockList },
): readonly [local: number, remote: number] {
  const begin = ({ tokens, length, dcp }: BlockList) =>
    (Math.ceil((numTokens as number) / (tokens * dcp)) - length) * tokens * dcp;
  const remoteBegin = windowed && numTokens !== undefined ? begin(remote) : 0;
  const computed = windowed ? undefined : localComputedBlocks?.[group];
  let localBegin = 0;
  if (computed !== undefined) localBegin = computed * local.tokens * local.dcp;
  else if (numTokens !== undefined) localBegin = begin(local);
  else if (local.tokens === remote.tokens && local.dcp === remote.dcp)
    localBegin = (remote.length - local.length) * local.tokens * local.dcp;
  return [localBegin, remoteBegin];
}

/**
 * Blocks without tokens: both lists end together. A state may have one more local block, which the
 * local engine computes itself.
 */
function tokenlessBlocks(
  group: number,
  isState: boolean,
  given: {
    readonly local: RankGeometry;
    readonly remotes: readonly RankGeometry[];
    readonly localIds: readonly number[];
    readonly remoteIds: readonly number[];
  },
): NeededTokens {
  const { localIds, remoteIds, local, remotes } = given;
  const paired = Math.min(localIds.length, remoteIds.length);
  const list = (rank: RankGeometry, ids: readonly number[], begin: number) =>
    isState
      ? { blocks: ids, tokens: ids.map((_, index) => begin + index) }
      : expanded(
          rank,
          ids,
          (index) => (begin + index) * rank.physicalBlocksPerLogical,
          rank.physicalBlocksPerLogical,
        );
  const per = isState ? 1 : local.physicalBlocksPerLogical;
  return {
    group,
    local: blockTokens(`group ${group}: local`, list(local, localIds, 0)),
    remotes: remotes.map((rank) =>
      blockTokens(`group ${group}: remote`, list(rank, remoteIds, paired - remoteIds.length)),
    ),
    fromToken: 0,
    endToken: paired * per,
  };
}

/** Logical blocks as kernel blocks, each with its first token. */
function expanded(
  { physicalBlocksPerLogical: per }: RankGeometry,
  ids: readonly number[],
  begin: (index: number) => number,
  tokens: number,
): { readonly blocks: readonly number[]; readonly tokens: readonly number[] } {
  const [blocks, firsts]: [number[], number[]] = [[], []];
  for (const [index, id] of ids.entries()) {
    for (let part = 0; part < per; part++) {
      blocks.push(id * per + part);
      firsts.push(begin(index) + (part * tokens) / per);
    }
  }
  return { blocks, tokens: firsts };
}

function blockTokens(what: string, list: Omit<BlockTokens, "position">): BlockTokens {
  const position = new Map<number, number>();
  for (const [index, block] of list.blocks.entries()) {
    const before = position.get(block);
    if (before !== undefined)
      fail("request-tables", `${what} block ${block} is listed twice`, {
        block,
        before,
        position: index,
      });
    position.set(block, index);
  }
  return { ...list, position };
}
