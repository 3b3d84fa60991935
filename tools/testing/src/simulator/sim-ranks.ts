import type { KvCacheConfig, KvCaches, Memory, Transport } from "@kv/interface";
import {
  blockBytes,
  firstWrongToken,
  type RankShare,
  rankShare,
  wordsOf,
  writeTokens,
} from "./kv-pattern.js";

export interface GroupTokens {
  readonly prompt: number;
  readonly group: number;
  /** By position in the prompt. */
  readonly blockIds: readonly number[];
  readonly from: number;
  readonly until: number;
}

/** Bytes of a whole model's state: three projections of the convolution, and the recurrent state. */
const STATE_PARTS = [64, 32, 32, 128];

export function stateSpaceOf(tpSize: number): NonNullable<KvCacheConfig["stateSpace"]> {
  const [recurrentBytes = 0, ...convProjectionBytes] = STATE_PARTS.map(
    (bytes) => bytes / tpSize,
  ).toReversed();
  return { convProjectionBytes: convProjectionBytes.toReversed(), recurrentBytes };
}

/** A rank's even share of each part after `tokens` tokens. */
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

/** Memory of the ranks. Unused blocks have poison, bytes that no prompt's KV has. */
export interface SimRanks {
  readonly caches: readonly KvCaches[];
  /** On all layers of the group, or on those before `beforeLayer`. */
  compute(tokens: GroupTokens, beforeLayer?: number): void;
  /**
   * Describes the first wrong token; undefined when all are right. With `tailZeroed`, those behind
   * `until` in the last block must be zero.
   */
  firstWrong(tokens: GroupTokens, tailZeroed: boolean): string | undefined;
  poison(group: number, blockId: number): void;
  /** True when nothing wrote to the block since it was poisoned. */
  poisoned(group: number, blockId: number): boolean;
  close(): void;
}

/** Also of simulated device memory, whose bytes the code under test cannot access. */
function bytesOf(memory: Memory): Uint8Array {
  return memory.memoryType === "DRAM"
    ? memory.bytes
    : (memory as Memory & { data: Uint8Array }).data;
}

const POISON = 0xdb;
const POISONED_WORD = 0xdbdbdbdb;

interface MemoryOptions {
  readonly transport: Transport;
  readonly config: KvCacheConfig;
  readonly tpSize: number;
  readonly ppSize?: number;
  readonly dcpSize?: number | undefined;
  readonly numBlocks: number;
}

export function createSimRanks(options: MemoryOptions): SimRanks {
  const { transport, config, tpSize, ppSize = 1, dcpSize = 1, numBlocks } = options;
  const layers = config.groups
    .flatMap(({ layerNames, kind, numKvHeads, blockSize = config.blockSize }, group) =>
      layerNames.map((name) => ({ name, group, numKvHeads, blockSize, isState: kind === "mamba" })),
    )
    .map((each, layer) => ({ ...each, layer }));
  const layersPerStage = Math.ceil(layers.length / ppSize);
  const ranks = Array.from({ length: ppSize * tpSize }, (_, rank) => {
    const [tpRank, firstLayer] = [rank % tpSize, Math.floor(rank / tpSize) * layersPerStage];
    return layers.slice(firstLayer, firstLayer + layersPerStage).map((each) => {
      const ofLayer = { ...config, numKvHeads: each.numKvHeads ?? config.numKvHeads };
      const share: RankShare = {
        ...rankShare(ofLayer, tpRank, tpSize, dcpSize),
        blockSize: each.blockSize,
      };
      const ofState = STATE_PARTS.reduce((sum, bytes) => sum + bytes / tpSize, 0);
      const length = each.isState ? ofState : blockBytes(share);
      const memory = transport.allocate(length * numBlocks);
      const bytes = bytesOf(memory).fill(POISON);
      return { ...each, rank, tpRank, share, length, memory, bytes };
    });
  });
  const all = ranks.flat();
  const byGroup = config.groups.map((_, group) => all.filter((each) => each.group === group));
  const ofGroup = (group: number) => byGroup[group] ?? [];
  const blocks = (group: number, blockId: number) =>
    ofGroup(group).map(({ bytes, length }) =>
      bytes.subarray(blockId * length, (blockId + 1) * length),
    );

  return {
    caches: ranks.map((rank) => ({
      config,
      regions: rank.map(({ name, group, length, memory }) => ({
        name,
        memory,
        offsetBytes: 0,
        numBlocks,
        groupId: group,
        memoryType: memory.memoryType,
        blockLengthBytes: length,
        blockStrideBytes: length,
      })),
    })),
    compute({ group, ...tokens }, beforeLayer = layers.length) {
      for (const { bytes, share, layer, isState, length, tpRank } of ofGroup(group)) {
        if (layer >= beforeLayer) continue;
        if (!isState) writeTokens(bytes, share, { layer, ...tokens });
        else if (tokens.until > 0)
          bytes.set(
            stateBytes({ ...tokens, layer, tokens: tokens.until, tpRank, tpSize }),
            (tokens.blockIds.at(-1) ?? 0) * length,
          );
      }
    },
    firstWrong({ group, ...tokens }, tailZeroed) {
      for (const { bytes, share, layer, rank, tpRank, isState, length } of ofGroup(group)) {
        const place = `${config.groups.length > 1 ? `group ${group}, ` : ""}rank ${rank}, layer ${layer}`;
        if (isState) {
          const at = (tokens.blockIds.at(-1) ?? 0) * length;
          const expected = stateBytes({ ...tokens, layer, tokens: tokens.until, tpRank, tpSize });
          if (expected.some((byte, i) => bytes[at + i] !== byte))
            return `${place}: not the state after ${tokens.until} tokens`;
          continue;
        }
        const token = firstWrongToken(bytes, share, { layer, ...tokens }, tailZeroed);
        if (token !== undefined) return `${place}, token ${token} of ${tokens.until}`;
      }
      return undefined;
    },
    poison(group, blockId) {
      for (const block of blocks(group, blockId)) block.fill(POISON);
    },
    poisoned: (group, blockId) =>
      blocks(group, blockId).every((block) =>
        wordsOf(block).every((word) => word === POISONED_WORD),
      ),
    close() {
      for (const { memory } of all) memory.close();
    },
  };
}
