import type { KvCacheConfig, KvCaches, Memory, Transport } from "@kv/interface";
import {
  blockBytes,
  firstWrongToken,
  type RankShare,
  rankShare,
  wordsOf,
  writeTokens,
} from "./kv-pattern.js";

/** Memory of a simulated engine's ranks. Writes KV, checks the KV that the model would read, and fills unused blocks with poison. */
export interface SimRanks {
  readonly caches: readonly KvCaches[];
  /** Writes the tokens `[from, until)` of a prompt on all layers, or only on the layers before `beforeLayer`. */
  compute(
    prompt: number,
    blockIds: readonly number[],
    from: number,
    until: number,
    beforeLayer?: number,
  ): void;
  /** Describes the first wrong token. Undefined when the KV of the whole prompt is correct on every rank and layer. */
  firstWrong(
    prompt: number,
    blockIds: readonly number[],
    numTokens: number,
    received: boolean,
  ): string | undefined;
  /** Fills a block with bytes that no prompt's KV has. */
  poison(blockId: number): void;
  /** True when a block still holds only poison, which means that nothing wrote to it since it was poisoned. */
  poisoned(blockId: number): boolean;
  close(): void;
}

const POISON = 0xdb;
const POISONED_WORD = 0xdbdbdbdb;

/** Bytes of a memory. Also works for simulated device memory, whose bytes the code under test cannot access. */
function bytesOf(memory: Memory): Uint8Array {
  return memory.memoryType === "DRAM" ? memory.bytes : (memory as Memory & { data: Uint8Array }).data;
}

export function createSimRanks(options: {
  transport: Transport;
  config: KvCacheConfig;
  tpSize: number;
  ppSize?: number;
  dcpSize?: number | undefined;
  numBlocks: number;
}): SimRanks {
  const { transport, config, tpSize, ppSize = 1, dcpSize = 1, numBlocks } = options;
  const layerNames = config.groups.flatMap(({ layerNames: names }) => names);
  const layersPerStage = Math.ceil(layerNames.length / ppSize);
  const ranks = Array.from({ length: ppSize * tpSize }, (_, rank) => {
    const share = rankShare(config, rank % tpSize, tpSize, dcpSize);
    const firstLayer = Math.floor(rank / tpSize) * layersPerStage;
    const layers = [...layerNames.keys()].slice(firstLayer, firstLayer + layersPerStage);
    const memories = layers.map((layer) => ({
      layer,
      memory: transport.allocate(blockBytes(share) * numBlocks),
    }));
    for (const { memory } of memories) bytesOf(memory).fill(POISON);
    return { share, memories };
  });

  function each(visit: (bytes: Uint8Array, share: RankShare, layer: number, rank: number) => void): void {
    for (const [rank, { share, memories }] of ranks.entries()) {
      for (const { layer, memory } of memories) visit(bytesOf(memory), share, layer, rank);
    }
  }

  function block(bytes: Uint8Array, share: RankShare, blockId: number): Uint8Array {
    const length = blockBytes(share);
    return bytes.subarray(blockId * length, (blockId + 1) * length);
  }

  return {
    caches: ranks.map(({ share, memories }) => ({
      config,
      regions: memories.map(({ layer, memory }) => ({
        name: layerNames[layer] ?? "",
        memory,
        offsetBytes: 0,
        numBlocks,
        blockLengthBytes: blockBytes(share),
        blockStrideBytes: blockBytes(share),
        groupId: 0,
        memoryType: memory.memoryType,
      })),
    })),
    compute(prompt, blockIds, from, until, beforeLayer = Number.POSITIVE_INFINITY) {
      each((bytes, share, layer) => {
        if (layer < beforeLayer) writeTokens(bytes, share, { layer, prompt, blockIds, from, until });
      });
    },
    firstWrong(prompt, blockIds, numTokens, received) {
      let wrong: string | undefined;
      each((bytes, share, layer, rank) => {
        const at = { layer, prompt, blockIds, from: 0, until: numTokens };
        const token = firstWrongToken(bytes, share, at, received);
        if (token !== undefined) wrong ??= `rank ${rank}, layer ${layer}, token ${token} of ${numTokens}`;
      });
      return wrong;
    },
    poison(blockId) {
      each((bytes, share) => block(bytes, share, blockId).fill(POISON));
    },
    poisoned(blockId) {
      let intact = true;
      each((bytes, share) => {
        for (const word of wordsOf(block(bytes, share, blockId))) if (word !== POISONED_WORD) intact = false;
      });
      return intact;
    },
    close() {
      for (const { memories } of ranks) for (const { memory } of memories) memory.close();
    },
  };
}
