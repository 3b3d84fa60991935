import type { EngineRanks } from "@kv/conformance/engine/ranks";
import { blockBytes, firstWrongToken, rankShare, writeTokens } from "@kv/conformance/engine/ranks";
import type { KvCacheConfig, KvCacheRegion } from "@kv/interface";
import { type NeuronDevice, neuronCaches } from "../src/index.js";

const POISON = 0xdb;

/**
 * Memory of a simulated engine's ranks on a Neuron device, with K and V of a layer in separate
 * planes.
 */
export function neuronRanks(options: {
  readonly device: NeuronDevice;
  readonly config: KvCacheConfig;
  readonly tpSize: number;
  readonly numBlocks: number;
}): EngineRanks {
  const { device, config, tpSize, numBlocks } = options;
  const ranks = Array.from({ length: tpSize }, (_, tpRank) => {
    const share = rankShare(config, tpRank, tpSize);
    const caches = neuronCaches({ device, config, numBlocks, numHeads: share.heads });
    caches.regions[0]?.memory.bytes.fill(POISON);
    return { share, caches };
  });
  type Rank = (typeof ranks)[number];

  const planeOf = ({ memory, offsetBytes, blockStrideBytes }: KvCacheRegion, block: number) =>
    memory.bytes.subarray(
      offsetBytes + block * blockStrideBytes,
      offsetBytes + (block + 1) * blockStrideBytes,
    );

  /** Rows of tokens `[from, until)` between a layer's planes and adjacent packed blocks `[K|V]`. */
  function exchange(
    { share, caches }: Rank,
    layer: number,
    packed: Uint8Array,
    at: { blockIds: readonly number[]; from: number; until: number; toDevice: boolean },
  ): void {
    const half = share.cellBytes / 2;
    for (const [plane, region] of caches.regions.slice(2 * layer, 2 * layer + 2).entries()) {
      for (let token = at.from; token < at.until; token++) {
        const index = Math.floor(token / share.blockSize);
        const bytes = planeOf(region, at.blockIds[index] ?? -1);
        for (let head = 0; head < share.heads; head++) {
          const row = head * share.blockSize + (token % share.blockSize);
          const inPacked = index * blockBytes(share) + row * share.cellBytes + plane * half;
          if (at.toDevice) bytes.set(packed.subarray(inPacked, inPacked + half), row * half);
          else packed.set(bytes.subarray(row * half, (row + 1) * half), inPacked);
        }
      }
    }
  }

  const layers = config.groups.flatMap(({ layerNames }) => layerNames).map((_, layer) => layer);
  const inOrder = (blockIds: readonly number[]) => blockIds.map((_, index) => index);
  const planes = (block: number) =>
    ranks.flatMap(({ caches }) => caches.regions.map((region) => planeOf(region, block)));

  return {
    caches: ranks.map(({ caches }) => caches),
    compute({ prompt, blockIds, from, until }) {
      for (const rank of ranks) {
        for (const layer of layers) {
          const packed = new Uint8Array(blockIds.length * blockBytes(rank.share));
          writeTokens(packed, rank.share, {
            layer,
            prompt,
            blockIds: inOrder(blockIds),
            from,
            until,
          });
          exchange(rank, layer, packed, { blockIds, from, until, toDevice: true });
        }
      }
    },
    firstWrong({ prompt, blockIds, until: numTokens }, tailZeroed) {
      for (const [tpRank, rank] of ranks.entries()) {
        for (const layer of layers) {
          const packed = new Uint8Array(blockIds.length * blockBytes(rank.share));
          const until = Math.ceil(numTokens / rank.share.blockSize) * rank.share.blockSize;
          exchange(rank, layer, packed, { blockIds, from: 0, until, toDevice: false });
          const at = { layer, prompt, blockIds: inOrder(blockIds), from: 0, until: numTokens };
          const token = firstWrongToken(packed, rank.share, at, tailZeroed);
          if (token !== undefined)
            return `rank ${tpRank}, layer ${layer}, token ${token} of ${numTokens}`;
        }
      }
      return undefined;
    },
    poison(_, blockId) {
      for (const bytes of planes(blockId)) bytes.fill(POISON);
    },
    poisoned: (_, blockId) =>
      planes(blockId).every((bytes) => bytes.every((byte) => byte === POISON)),
    close() {
      void device.close();
    },
  };
}
