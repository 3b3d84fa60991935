import type { KvCacheConfig, KvCaches, Transport } from "@kv/interface";
import {
  blockBytes,
  firstWrongToken,
  type RankShare,
  rankShare,
  wordsOf,
  writeTokens,
} from "../simulator/kv-pattern.js";

/** Tokens of a prompt in the blocks of one group. */
export interface GroupTokens {
  /** Number that identifies the prompt. */
  readonly prompt: number;
  readonly group: number;
  /** The request's blocks of the group, by position in the prompt. */
  readonly blockIds: readonly number[];
  readonly from: number;
  readonly until: number;
}

/** Memory of an engine's ranks, whose groups have blocks of their own sizes. */
export interface GroupMemory {
  readonly caches: readonly KvCaches[];
  /** Writes the KV of tokens on all ranks and layers of a group. */
  compute(tokens: GroupTokens): void;
  /** Describes the first wrong token, also among those behind `until` in the last block, which must be zero. Undefined when all are right. */
  firstWrong(tokens: GroupTokens): string | undefined;
  /** Fills a block with bytes that no prompt's KV has. */
  poison(group: number, blockId: number): void;
  poisoned(group: number, blockId: number): boolean;
}

const POISON = 0xdb;
const POISONED_WORD = 0xdbdbdbdb;

export function createGroupMemory(options: {
  readonly transport: Transport;
  readonly config: KvCacheConfig;
  readonly tpSize: number;
  readonly numBlocks: number;
}): GroupMemory {
  const { transport, config, tpSize, numBlocks } = options;
  const layers = config.groups.flatMap(({ layerNames, blockSize = config.blockSize }, group) =>
    layerNames.map((name) => ({ name, group, blockSize })),
  );
  const ranks = Array.from({ length: tpSize }, (_, tpRank) =>
    layers.map(({ name, group, blockSize }, layer) => {
      const share: RankShare = { ...rankShare(config, tpRank, tpSize), blockSize };
      const memory = transport.allocate(blockBytes(share) * numBlocks);
      memory.bytes.fill(POISON);
      return { name, layer, group, share, memory };
    }),
  );
  const ofGroup = (group: number) =>
    ranks.flatMap((rank, tpRank) =>
      rank.flatMap((each) => (each.group === group ? [{ ...each, tpRank, bytes: each.memory.bytes }] : [])),
    );
  const blocks = (group: number, blockId: number) =>
    ofGroup(group).map(({ bytes, share }) =>
      bytes.subarray(blockId * blockBytes(share), (blockId + 1) * blockBytes(share)),
    );

  return {
    caches: ranks.map((rank) => ({
      config,
      regions: rank.map(({ name, group, share, memory }) => ({
        ...{ name, memory, offsetBytes: 0, numBlocks, groupId: group, memoryType: memory.memoryType },
        ...{ blockLengthBytes: blockBytes(share), blockStrideBytes: blockBytes(share) },
      })),
    })),
    compute({ group, ...tokens }) {
      for (const { bytes, share, layer } of ofGroup(group)) writeTokens(bytes, share, { layer, ...tokens });
    },
    firstWrong({ group, ...tokens }) {
      for (const { bytes, share, layer, tpRank } of ofGroup(group)) {
        const token = firstWrongToken(bytes, share, { layer, ...tokens }, true);
        if (token !== undefined)
          return `group ${group} of ${share.blockSize} tokens per block, rank ${tpRank}, layer ${layer}, token ${token} of ${tokens.until}`;
      }
      return undefined;
    },
    poison(group, blockId) {
      for (const block of blocks(group, blockId)) block.fill(POISON);
    },
    poisoned: (group, blockId) =>
      blocks(group, blockId).every((block) => wordsOf(block).every((word) => word === POISONED_WORD)),
  };
}
