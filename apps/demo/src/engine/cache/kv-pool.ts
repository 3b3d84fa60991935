import { type KvCacheConfig, type KvCaches, KvError, type Transport } from "@kv/interface";
import {
  contentBytes,
  DIGEST_TOKENS,
  type KvGeometry,
  type KvShard,
  kvBytes,
  kvDigests,
  kvShards,
} from "./kv-layout.js";

export interface KvPoolOptions {
  readonly transport: Transport;
  readonly geometry: KvGeometry;
  readonly numBlocks: number;
  readonly blockSize: number;
  /** Tensor-parallel ranks: each has an allocation and a shard of the KV heads of its own. */
  readonly tp: number;
  /** Names the order inside a head for peers; the content here is plain `[K|V]` per token. */
  readonly attentionBackend?: string;
  /** A rank's caches in memory of another kind, in one `Memory`; those with K and V in regions of their own, K first, have two a layer. */
  readonly openCaches?: (rank: { config: KvCacheConfig; numBlocks: number; numHeads: number }) => KvCaches;
  /** Name of a layer's region, equal on both sides of a pair. The default is what vLLM calls it. */
  readonly layerName?: (layer: number) => string;
}

/** Tokens `[from, from + count)` of a request whose blocks are `blockIds`. */
export interface TokenSpan {
  readonly blockIds: readonly number[];
  readonly from: number;
  readonly count: number;
}

/**
 * The paged KV cache of one instance, in memory that the transport can register. Per rank one allocation, in it one region a
 * layer of shape `[numBlocks, heads of the rank, blockSize, 2 * headDim]` float32 (layout LBHNC, K then V in the last dimension). What
 * goes in and out is `[layer][KV head][token][2 * headDim]` over all heads, in one buffer; no copy runs on the JavaScript thread
 * but the interleaving of the ranks' shards.
 */
export interface KvPool {
  readonly config: KvCacheConfig;
  /** By rank, for each rank's worker connector. */
  readonly caches: readonly KvCaches[];
  /** Puts the KV of a span in, on every rank that holds the heads. */
  write(span: TokenSpan, kv: ArrayBuffer): Promise<void>;
  /** The same for one layer of it, `[KV head][token][2 * headDim]`. */
  writeLayer(span: TokenSpan, layer: number, kv: ArrayBuffer): Promise<void>;
  /** Takes the KV of a span out; heads that several ranks hold come from the first. */
  read(span: TokenSpan): Promise<ArrayBuffer>;
  /** Zeroes what lies in the last block behind the first `tokens` tokens, so that no other request's bytes are left there. */
  zeroTail(blockIds: readonly number[], tokens: number): Promise<void>;
  zeroBlock(blockId: number): Promise<void>;
  /** The block that an address lies in, whichever rank and layer; undefined outside the pool. */
  blockAt(address: number): number | undefined;
  /**
   * SHA-256 of each `DIGEST_TOKENS` tokens of a span (the last may be fewer), in the order of `read`: they depend neither on TP
   * nor on the block size nor on block ids, so what was sent can be compared with what was received. Errors:
   * `KV_BLOCKS_MISMATCH` when the ranks that hold the same head disagree on its bytes.
   */
  digests(span: TokenSpan): Promise<string[]>;
  close(): void;
}

export function createKvPool(options: KvPoolOptions): KvPool {
  const { transport, geometry, numBlocks, blockSize, tp } = options;
  const layerName = options.layerName ?? ((layer) => `model.layers.${layer}.self_attn.attn`);
  const content = contentBytes(geometry);
  const layers = Array.from({ length: geometry.layers }, (_, layer) => layer);
  const config: KvCacheConfig = {
    groups: [{ kind: "full", layerNames: layers.map(layerName) }],
    blockSize,
    physicalBlocksPerLogical: 1,
    numKvHeads: geometry.kvHeads,
    headSize: geometry.headDim,
    numHiddenLayers: geometry.layers,
    dtype: "torch.float32",
    cacheDtype: "auto",
    layout: "LBHNC",
    attentionBackend: options.attentionBackend ?? "PLAIN",
  };
  const ranks = kvShards(geometry.kvHeads, tp).map((shard) => openRank(shard));

  function openRank(shard: KvShard) {
    const blockLengthBytes = shard.headCount * blockSize * content;
    const layerBytes = numBlocks * blockLengthBytes;
    if (options.openCaches !== undefined) {
      const caches = options.openCaches({ config, numBlocks, numHeads: shard.headCount });
      const memory = caches.regions[0]?.memory;
      if (memory === undefined) throw new KvError("KV_INTERNAL", "a rank's caches have no region");
      return { shard, memory, layerBytes, blockLengthBytes, caches };
    }
    const memory = transport.allocate(geometry.layers * layerBytes);
    const regions = layers.map((layer) => ({
      name: layerName(layer),
      memory,
      offsetBytes: layer * layerBytes,
      numBlocks,
      blockLengthBytes,
      blockStrideBytes: blockLengthBytes,
      groupId: 0,
      memoryType: memory.memoryType,
    }));
    return { shard, memory, layerBytes, blockLengthBytes, caches: { config, regions } satisfies KvCaches };
  }
  type Rank = (typeof ranks)[number];

  /** Rows `[offset, length]` of a span in a rank's memory, ordered by layer, head and token; of all layers, or of some. */
  function runsOfSpan(rank: Rank, { blockIds, from, count }: TokenSpan, some = layers): Float64Array {
    checkSpan(blockIds, from, count);
    const pieces: { block: number; begin: number; length: number }[] = [];
    for (let token = from; token < from + count; ) {
      const begin = token % blockSize;
      const length = Math.min(blockSize - begin, from + count - token);
      pieces.push({ block: blockIds[Math.floor(token / blockSize)] ?? 0, begin, length });
      token += length;
    }
    const { regions } = rank.caches;
    const apart = regions.length === 2 * geometry.layers;
    const rows = new Float64Array(
      2 * some.length * rank.shard.headCount * (apart ? 2 * count : pieces.length),
    );
    let at = 0;
    /** K and V of a token from regions of their own, in turns as the model has them. */
    const pushApart = (layer: number, head: number): void => {
      const row = content / 2;
      for (const { block, begin, length } of pieces) {
        for (let token = begin; token < begin + length; token++) {
          for (const region of regions.slice(2 * layer, 2 * layer + 2)) {
            rows[at++] =
              region.offsetBytes + block * region.blockStrideBytes + (head * blockSize + token) * row;
            rows[at++] = row;
          }
        }
      }
    };
    for (const layer of some) {
      for (let head = 0; head < rank.shard.headCount; head++) {
        if (apart) {
          pushApart(layer, head);
          continue;
        }
        const base = layer * rank.layerBytes + head * blockSize * content;
        for (const { block, begin, length } of pieces) {
          rows[at++] = base + block * rank.blockLengthBytes + begin * content;
          rows[at++] = length * content;
        }
      }
    }
    return rows;
  }

  function checkSpan(blockIds: readonly number[], from: number, count: number): void {
    if (from < 0 || count < 0 || from + count > blockIds.length * blockSize) {
      throw new KvError(
        "KV_BLOCKS_MISMATCH",
        `tokens ${from} to ${from + count} lie outside ${blockIds.length} blocks of ${blockSize} tokens`,
        { details: { from, count, blocks: blockIds.length, blockSize } },
      );
    }
    const bad = blockIds.find((id) => !Number.isInteger(id) || id < 1 || id >= numBlocks);
    if (bad !== undefined) {
      throw new KvError("KV_BLOCKS_OUT_OF_RANGE", `block ${bad} is not one of 1 to ${numBlocks - 1}`, {
        details: { block: bad, numBlocks },
      });
    }
  }

  /** Moves between the buffer of all heads and a rank's own part of it; the heads of a rank are adjacent within a layer. */
  function exchange(all: Uint8Array, part: Uint8Array, shard: KvShard, count: number, toPart: boolean): void {
    const headBytes = count * content;
    const length = shard.headCount * headBytes;
    for (const layer of layers) {
      const inAll = (layer * geometry.kvHeads + shard.firstHead) * headBytes;
      const inPart = layer * length;
      if (toPart) part.set(all.subarray(inAll, inAll + length), inPart);
      else all.set(part.subarray(inPart, inPart + length), inAll);
    }
  }

  async function zero(rank: Rank, rows: Float64Array): Promise<void> {
    let total = 0;
    for (let i = 1; i < rows.length; i += 2) total += rows[i] ?? 0;
    if (total > 0) await rank.memory.scatter(rows, new ArrayBuffer(total));
  }

  async function read(span: TokenSpan, from: readonly Rank[]): Promise<ArrayBuffer> {
    if (ranks.length === 1 && ranks[0] !== undefined)
      return ranks[0].memory.gather(runsOfSpan(ranks[0], span));
    const all = new ArrayBuffer(kvBytes(geometry, span.count));
    await Promise.all(
      from.map(async (rank) => {
        const part = await rank.memory.gather(runsOfSpan(rank, span));
        exchange(new Uint8Array(all), new Uint8Array(part), rank.shard, span.count, false);
      }),
    );
    return all;
  }

  /** Each entry holds every head once: the first replica of each, the second, and so on. */
  function replicas(): Rank[][] {
    const primaries = ranks.filter((rank) => rank.shard.primary).length;
    const copies = ranks.length / primaries;
    return Array.from({ length: copies }, (_, copy) =>
      ranks.filter((rank) => rank.shard.rank % copies === copy),
    );
  }

  return {
    config,
    caches: ranks.map((rank) => rank.caches),

    async write(span, kv) {
      const expected = kvBytes(geometry, span.count);
      if (kv.byteLength !== expected) {
        throw new KvError(
          "KV_BLOCKS_MISMATCH",
          `KV of ${span.count} tokens takes ${expected} bytes, and ${kv.byteLength} were given`,
          { details: { tokens: span.count, expected, given: kv.byteLength } },
        );
      }
      await Promise.all(
        ranks.map(async (rank) => {
          if (ranks.length === 1) return rank.memory.scatter(runsOfSpan(rank, span), kv);
          const part = new ArrayBuffer((expected / geometry.kvHeads) * rank.shard.headCount);
          exchange(new Uint8Array(kv), new Uint8Array(part), rank.shard, span.count, true);
          return rank.memory.scatter(runsOfSpan(rank, span), part);
        }),
      );
    },

    async writeLayer(span, layer, kv) {
      const headBytes = span.count * content;
      await Promise.all(
        ranks.map(async (rank) => {
          const { firstHead, headCount } = rank.shard;
          const part =
            ranks.length === 1 ? kv : kv.slice(firstHead * headBytes, (firstHead + headCount) * headBytes);
          await rank.memory.scatter(runsOfSpan(rank, span, [layer]), part);
        }),
      );
    },

    read: (span) => read(span, replicas()[0] ?? []),

    async zeroTail(blockIds, tokens) {
      const count = blockIds.length * blockSize - tokens;
      if (count <= 0) return;
      await Promise.all(ranks.map((rank) => zero(rank, runsOfSpan(rank, { blockIds, from: tokens, count }))));
    },

    async zeroBlock(blockId) {
      const span = { blockIds: [blockId], from: 0, count: blockSize };
      await Promise.all(ranks.map((rank) => zero(rank, runsOfSpan(rank, span))));
    },

    blockAt(address) {
      const rank = ranks.find(
        ({ memory }) => address >= memory.address && address < memory.address + memory.lengthBytes,
      );
      if (rank === undefined) return undefined;
      return Math.floor(((address - rank.memory.address) % rank.layerBytes) / rank.blockLengthBytes);
    },

    async digests(span) {
      const [first = [], ...others] = await Promise.all(
        replicas().map(async (replica) => kvDigests(await read(span, replica), geometry, span.count)),
      );
      for (const other of others) {
        const at = first.findIndex((digest, i) => digest !== other[i]);
        if (at < 0) continue;
        throw new KvError("KV_BLOCKS_MISMATCH", "ranks that hold the same KV heads hold different bytes", {
          details: { fromToken: span.from + at * DIGEST_TOKENS },
        });
      }
      return first;
    },

    close() {
      for (const { memory } of ranks) memory.close();
    },
  };
}
