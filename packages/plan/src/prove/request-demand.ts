import type { ModelGeometry, RankGeometry } from "../geometry.js";
import type { RequestBlocks } from "../request-plan-types.js";
import { kindMeaning, tokensInBlock } from "./kind-meaning.js";
import { fail } from "./verdict.js";

/** Blocks of a group on one rank, and the token of the sequence with which each begins. */
export interface BlockTokens {
  /** Kernel blocks, or logical ones for a state. */
  readonly blocks: readonly number[];
  readonly tokens: readonly number[];
  readonly position: ReadonlyMap<number, number>;
}

/** What one group of a request asks for, read from the request alone: which token stands where on either side. */
export interface GroupDemand {
  readonly group: number;
  /** Blocks to fill. */
  readonly local: BlockTokens;
  /** The remote's blocks, by the position of the source in the plan: ranks of a DCP group have others. */
  readonly remotes: readonly BlockTokens[];
  /** Tokens that the request needs, from the first to one past the last. */
  readonly fromToken: number;
  readonly endToken: number;
}

export function demandOf(
  group: number,
  local: RankGeometry,
  remotes: readonly RankGeometry[],
  model: ModelGeometry,
  blocks: RequestBlocks,
): GroupDemand {
  const localIds = blocks.localBlockIds[group] ?? [];
  const remoteIds = blocks.remoteBlockIds[group] ?? [];
  const what = `group ${group}`;
  const [remote] = remotes;
  const kind = kindMeaning(model.groups[group] ?? "");
  if (kind === undefined)
    return fail("request-tables", `${what} is of kind "${model.groups[group]}", of which nothing is known`);
  if (remote === undefined) return fail("request-tables", `${what}: the plan reads from no remote rank`);
  if (kind.lists === "last")
    return withoutTokens(group, kind.sharing === "state", { local, remotes, localIds, remoteIds });

  const logical = (rank: RankGeometry, other: RankGeometry) =>
    tokensInBlock(rank, group, other) * rank.physicalBlocksPerLogical;
  const [localTokens, remoteTokens] = [logical(local, remote), logical(remote, local)];
  const { numTokens } = blocks;
  const [localDcp, remoteDcp] = [local.dcpSize ?? 1, remote.dcpSize ?? 1];
  const windowed = kind.lists === "window";
  const ends = (tokens: number) => Math.ceil((numTokens as number) / tokens) * tokens;
  // A window's list ends where the sequence does; any other begins with it.
  const remoteBegin =
    windowed && numTokens !== undefined ? ends(remoteTokens) - remoteIds.length * remoteTokens : 0;
  const computed = windowed ? undefined : blocks.localComputedBlocks?.[group];
  let localBegin: number;
  if (computed !== undefined) localBegin = computed * localTokens * localDcp;
  else if (localDcp * remoteDcp > 1) localBegin = 0;
  else if (numTokens !== undefined) localBegin = ends(localTokens) - localIds.length * localTokens;
  else if (localTokens === remoteTokens) localBegin = (remoteIds.length - localIds.length) * localTokens;
  else localBegin = 0;
  const tokensOf = (
    rank: RankGeometry,
    dcp: number,
    begin: number,
    ids: readonly number[],
    perBlock: number,
  ) => {
    // Blocks of a sequence are dealt out in turn to the ranks of a DCP group.
    const first = begin + (rank.tpRank % dcp) * perBlock;
    return expanded(rank, ids, (index) => first + index * dcp * perBlock, perBlock);
  };
  return {
    group,
    local: blockTokens(`${what}: local`, tokensOf(local, localDcp, localBegin, localIds, localTokens)),
    remotes: remotes.map((rank) =>
      blockTokens(`${what}: remote`, tokensOf(rank, remoteDcp, remoteBegin, remoteIds, remoteTokens)),
    ),
    fromToken: Math.max(0, remoteBegin),
    endToken: Math.min(
      numTokens ?? Number.POSITIVE_INFINITY,
      remoteBegin + remoteIds.length * remoteTokens * remoteDcp,
    ),
  };
}

/** Blocks without tokens end together; of a state, the local list may have one more, which its engine computes itself. */
function withoutTokens(
  group: number,
  isState: boolean,
  given: {
    readonly local: RankGeometry;
    readonly remotes: readonly RankGeometry[];
    readonly localIds: readonly number[];
    readonly remoteIds: readonly number[];
  },
): GroupDemand {
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
      fail("request-tables", `${what} block ${block} is listed twice`, { block, before, position: index });
    position.set(block, index);
  }
  return { ...list, position };
}
