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

/** Bytes of a recurrent state of the whole model, by part: three projections of the convolution, and the recurrent state. */
const STATE_PARTS = [64, 32, 32, 128];

/** Sizes of a rank's states, for `KvCacheConfig.stateSpace`. */
export function stateSpaceOf(tpSize: number): NonNullable<KvCacheConfig["stateSpace"]> {
  const [recurrentBytes = 0, ...convProjectionBytes] = STATE_PARTS.map(
    (bytes) => bytes / tpSize,
  ).toReversed();
  return { convProjectionBytes: convProjectionBytes.toReversed(), recurrentBytes };
}

/** The bytes of a rank's state after `tokens` tokens of a prompt: its even share of each part. */
function stateBytes(at: {
  readonly prompt: number;
  readonly layer: number;
  readonly tokens: number;
  readonly tpRank: number;
  readonly tpSize: number;
}): number[] {
  const { prompt, layer, tokens, tpRank, tpSize } = at;
  return STATE_PARTS.flatMap((bytes, part) => {
    const share = bytes / tpSize;
    return Array.from({ length: share }, (_, i) => {
      const word = Math.imul(((prompt * 31 + layer) * 31 + part) * 8191 + tokens, 2_654_435_761);
      return ((word >>> 8) + (tpRank * share + i) * 7) & 0xff;
    });
  });
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
    layerNames.map((name) => ({ name, group, blockSize, isState: config.groups[group]?.kind === "mamba" })),
  );
  const ranks = Array.from({ length: tpSize }, (_, tpRank) =>
    layers.map(({ name, group, blockSize, isState }, layer) => {
      const numKvHeads = config.groups[group]?.numKvHeads ?? config.numKvHeads;
      const share: RankShare = { ...rankShare({ ...config, numKvHeads }, tpRank, tpSize), blockSize };
      const length = isState
        ? STATE_PARTS.reduce((sum, bytes) => sum + bytes / tpSize, 0)
        : blockBytes(share);
      const memory = transport.allocate(length * numBlocks);
      memory.bytes.fill(POISON);
      return { name, layer, group, share, length, isState, memory };
    }),
  );
  const ofGroup = (group: number) =>
    ranks.flatMap((rank, tpRank) =>
      rank.flatMap((each) => (each.group === group ? [{ ...each, tpRank, bytes: each.memory.bytes }] : [])),
    );
  const blocks = (group: number, blockId: number) =>
    ofGroup(group).map(({ bytes, length }) => bytes.subarray(blockId * length, (blockId + 1) * length));

  return {
    caches: ranks.map((rank) => ({
      config,
      regions: rank.map(({ name, group, length, memory }) => ({
        ...{ name, memory, offsetBytes: 0, numBlocks, groupId: group, memoryType: memory.memoryType },
        ...{ blockLengthBytes: length, blockStrideBytes: length },
      })),
    })),
    compute({ group, ...tokens }) {
      for (const { bytes, share, layer, isState, length, tpRank } of ofGroup(group)) {
        if (!isState) writeTokens(bytes, share, { layer, ...tokens });
        else if (tokens.until > 0)
          bytes.set(
            stateBytes({ ...tokens, layer, tokens: tokens.until, tpRank, tpSize }),
            (tokens.blockIds.at(-1) ?? 0) * length,
          );
      }
    },
    firstWrong({ group, ...tokens }) {
      for (const { bytes, share, layer, tpRank, isState, length } of ofGroup(group)) {
        if (isState) {
          const at = (tokens.blockIds.at(-1) ?? 0) * length;
          const expected = stateBytes({ ...tokens, layer, tokens: tokens.until, tpRank, tpSize });
          if (expected.some((byte, i) => bytes[at + i] !== byte))
            return `group ${group}, rank ${tpRank}, layer ${layer}: not the state after ${tokens.until} tokens`;
          continue;
        }
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
