import type { ModelGeometry, RankGeometry } from "../geometry/rank-geometry.js";
import type { RequestBlocks } from "../request/request-blocks.js";
import { cacheSemantics, tokensInBlock } from "./cache-semantics.js";
import { fail } from "./proof-result.js";

/** Blocks of a group on one rank, and the token with which each begins. */
export interface BlockTokens {
  /** Kernel blocks, or logical ones for a state. */
  readonly blocks: readonly number[];
  readonly tokens: readonly number[];
  readonly position: ReadonlyMap<number, number>;
}

/** What a group of a request needs on both sides, from the request alone. */
export interface NeededTokens {
  readonly group: number;
  readonly local: BlockTokens;
  /** By source: the ranks of a DCP group have different blocks. */
  readonly remotes: readonly BlockTokens[];
  readonly fromToken: number;
  /** One past the last. */
  readonly endToken: number;
}

/** Returns the tokens that a group needs. `local` is the destination, `remotes` are the sources. */
export function neededTokens(
  group: number,
  local: RankGeometry,
  remotes: readonly RankGeometry[],
  model: ModelGeometry,
  blocks: RequestBlocks,
): NeededTokens {
  const [remote] = remotes;
  const kind = cacheSemantics(model.groups[group] ?? "");
  if (kind === undefined)
    return fail("request-tables", `group ${group} is of the unknown kind "${model.groups[group]}"`);
  if (remote === undefined)
    return fail("request-tables", `group ${group}: the plan reads from no remote rank`);

  const listOf = (rank: RankGeometry, other: RankGeometry, ids: readonly number[] = []) => {
    const kernelBlocks = kind.sharing === "state" ? 1 : rank.physicalBlocksPerLogical;
    // A block without tokens counts as one token.
    if (kind.lists === "last") return { rank, ids, kernelBlocks, tokens: kernelBlocks, dcp: 1 };
    const tokens = tokensInBlock(rank, group, other) * kernelBlocks;
    return { rank, ids, kernelBlocks, tokens, dcp: rank.dcpSize ?? 1 };
  };
  const mine = listOf(local, remote, blocks.localBlockIds[group]);
  const theirs = remotes.map((rank) => listOf(rank, local, blocks.remoteBlockIds[group]));
  const [their] = theirs as [BlockList];
  const [localBegin, remoteBegin] = listBegins(kind.lists, mine, their, group, blocks);
  const end = remoteBegin + their.ids.length * their.tokens * their.dcp;
  return {
    group,
    local: blockTokens(`group ${group}: local`, mine, localBegin),
    remotes: theirs.map((list) => blockTokens(`group ${group}: remote`, list, remoteBegin)),
    fromToken: Math.max(0, localBegin, remoteBegin),
    endToken: kind.lists === "last" ? end : Math.min(blocks.numTokens ?? end, end),
  };
}

interface BlockList {
  readonly rank: RankGeometry;
  readonly ids: readonly number[];
  readonly kernelBlocks: number;
  readonly tokens: number;
  readonly dcp: number;
}

/**
 * The local list begins after `localComputedBlocks`, the remote one with the sequence. A window's
 * lists end with the sequence; blocks without tokens end together, but a state may have one more
 * local block, which the local engine computes.
 */
function listBegins(
  lists: "sequence" | "window" | "last",
  local: BlockList,
  remote: BlockList,
  group: number,
  { numTokens, localComputedBlocks }: RequestBlocks,
): readonly [local: number, remote: number] {
  const [held, wanted] = [remote.ids.length, local.ids.length];
  if (lists === "last") return [0, (Math.min(wanted, held) - held) * remote.tokens];
  const begin = ({ ids, tokens, dcp }: BlockList, count: number) =>
    (Math.ceil(count / (tokens * dcp)) - ids.length) * tokens * dcp;
  const isWindow = lists === "window";
  const remoteBegin = isWindow && numTokens !== undefined ? begin(remote, numTokens) : 0;
  const computed = isWindow ? undefined : localComputedBlocks?.[group];
  if (computed !== undefined) return [computed * local.tokens * local.dcp, remoteBegin];
  if (numTokens !== undefined) return [begin(local, numTokens), remoteBegin];
  const isAlike = local.tokens === remote.tokens && local.dcp === remote.dcp;
  return [isAlike ? (held - wanted) * local.tokens * local.dcp : 0, remoteBegin];
}

function blockTokens(
  what: string,
  { rank, ids, kernelBlocks, tokens: perBlock, dcp }: BlockList,
  begin: number,
): BlockTokens {
  const blocks: number[] = [];
  const tokens: number[] = [];
  const position = new Map<number, number>();
  for (const [index, id] of ids.entries()) {
    // The blocks of a sequence go in turn to the ranks of a DCP group.
    const first = begin + (index * dcp + (rank.tpRank % dcp)) * perBlock;
    for (let part = 0; part < kernelBlocks; part++) {
      const block = id * kernelBlocks + part;
      const before = position.get(block);
      if (before !== undefined)
        fail("request-tables", `${what} block ${block} is listed twice`, {
          block,
          before,
          position: blocks.length,
        });
      position.set(block, blocks.length);
      blocks.push(block);
      tokens.push(first + (part * perBlock) / kernelBlocks);
    }
  }
  return { blocks, tokens, position };
}
