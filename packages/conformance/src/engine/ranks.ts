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
  readonly blockIds: readonly number[];
  readonly from: number;
  readonly until: number;
}

const STATE_PARTS = [64, 32, 32, 128];

export function stateSpaceOf(tpSize: number): NonNullable<KvCacheConfig["stateSpace"]> {
  const [recurrentBytes = 0, ...convProjectionBytes] = STATE_PARTS.map(
    (bytes) => bytes / tpSize,
  ).toReversed();
  return { convProjectionBytes: convProjectionBytes.toReversed(), recurrentBytes };
}

function stateBytes(
  { prompt, until }: Pick<GroupTokens, "prompt" | "until">,
  layer: number,
  tpRank: number,
  tpSize: number,
): number[] {
  return STATE_PARTS.flatMap((bytes, part) => {
    const share = bytes / tpSize;
    return Array.from({ length: share }, (_, i) => {
      const word = Math.imul(((prompt * 31 + layer) * 31 + part) * 8191 + until, 2_654_435_761);
      return ((word >>> 8) + (tpRank * share + i) * 7) & 0xff;
    });
  });
}

/** The code under test cannot access simulated device memory. */
function bytesOf(memory: Memory): Uint8Array {
  return memory.memoryType === "DRAM"
    ? memory.bytes
    : (memory as Memory & { data: Uint8Array }).data;
}

const POISON = 0xdb;
const POISONED_WORD = 0xdbdbdbdb;

export type EngineRanks = ReturnType<typeof createRanks>;

/** Unused blocks have poison, bytes that no prompt's KV has. */
export function createRanks(options: {
  readonly transport: Transport;
  readonly config: KvCacheConfig;
  readonly tpSize: number;
  readonly ppSize?: number;
  readonly dcpSize?: number;
  readonly numBlocks: number;
}) {
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
    caches: ranks.map(
      (rank): KvCaches => ({
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
      }),
    ),
    compute({ group, ...tokens }: GroupTokens, beforeLayer = layers.length): void {
      for (const { bytes, share, layer, isState, length, tpRank } of ofGroup(group)) {
        if (layer >= beforeLayer) continue;
        if (!isState) writeTokens(bytes, share, { layer, ...tokens });
        else if (tokens.until > 0)
          bytes.set(
            stateBytes(tokens, layer, tpRank, tpSize),
            (tokens.blockIds.at(-1) ?? 0) * length,
          );
      }
    },
    /** With `tailZeroed`, tokens behind `until` in the last block must be zero. */
    firstWrong({ group, ...tokens }: GroupTokens, tailZeroed: boolean): string | undefined {
      for (const { bytes, share, layer, rank, tpRank, isState, length } of ofGroup(group)) {
        const place = `${config.groups.length > 1 ? `group ${group}, ` : ""}rank ${rank}, layer ${layer}`;
        if (isState) {
          const at = (tokens.blockIds.at(-1) ?? 0) * length;
          const expected = stateBytes(tokens, layer, tpRank, tpSize);
          if (expected.some((byte, i) => bytes[at + i] !== byte))
            return `${place}: not the state after ${tokens.until} tokens`;
          continue;
        }
        const token = firstWrongToken(bytes, share, { layer, ...tokens }, tailZeroed);
        if (token !== undefined) return `${place}, token ${token} of ${tokens.until}`;
      }
      return undefined;
    },
    poison(group: number, blockId: number): void {
      for (const block of blocks(group, blockId)) block.fill(POISON);
    },
    /** Nothing wrote to the block since it was poisoned. */
    poisoned: (group: number, blockId: number) =>
      blocks(group, blockId).every((block) =>
        wordsOf(block).every((word) => word === POISONED_WORD),
      ),
    close(): void {
      for (const { memory } of all) memory.close();
    },
  };
}
