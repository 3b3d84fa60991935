import {
  type KvCacheConfig,
  type KvCaches,
  KvError,
  type Memory,
  type MemoryType,
  type Transport,
} from "@kv/interface";
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
  readonly tp: number;
  /** The name that peers compare. The content here is plain `[K|V]` per token. Default: "PLAIN". */
  readonly attentionBackend?: string | undefined;
  readonly cacheKind?: string | undefined;
  readonly memory?: { readonly memoryType: MemoryType; deviceOf(rank: number): number } | undefined;
  /**
   * Opens a rank's caches in one `Memory` of another kind than the transport's. With K and V in
   * separate regions there are two regions per layer, K first.
   */
  readonly openCaches?:
    | ((rank: { config: KvCacheConfig; numBlocks: number; numHeads: number }) => KvCaches)
    | undefined;
}

/** Tokens `[from, from + count)` of a request whose blocks are `blockIds`. */
export interface TokenSpan {
  readonly blockIds: readonly number[];
  readonly from: number;
  readonly count: number;
}

const layerName = (layer: number) => `model.layers.${layer}.self_attn.attn`;

/**
 * The paged KV cache of one instance, in memory that the transport can register. Each rank has one
 * allocation with a region per layer of shape
 * `[numBlocks, heads of the rank, blockSize, 2 * headDim]` float32 (layout LBHNC, K then V in the
 * last dimension). `read` and `write` use `[layer][KV head][token][2 * headDim]` over all heads in
 * one buffer. The JavaScript thread only interleaves the shards of the ranks; `Memory` makes all
 * other copies.
 */
export class KvPool {
  readonly config: KvCacheConfig;
  readonly caches: readonly KvCaches[];
  readonly #geometry: KvGeometry;
  readonly #ranks: readonly RankCache[];

  constructor(options: KvPoolOptions) {
    const { geometry, blockSize, tp } = options;
    this.#geometry = geometry;
    this.config = {
      groups: [
        { kind: options.cacheKind ?? "full", layerNames: layersOf(geometry).map(layerName) },
      ],
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
    this.#ranks = kvShards(geometry.kvHeads, tp).map(
      (shard) => new RankCache(shard, this.config, options),
    );
    this.caches = this.#ranks.map(({ caches }) => caches);
  }

  async write(span: TokenSpan, kv: ArrayBuffer): Promise<void> {
    const expected = kvBytes(this.#geometry, span.count);
    if (kv.byteLength !== expected) {
      throw new KvError(
        "KV_BLOCKS_MISMATCH",
        `KV of ${span.count} tokens has ${expected} bytes; ${kv.byteLength} were given`,
        { details: { tokens: span.count, expected, given: kv.byteLength } },
      );
    }
    const isOneRank = this.#ranks.length === 1;
    await Promise.all(
      this.#ranks.map(async (rank) => {
        await rank.memory.scatter(
          rank.rowsOf(span),
          isOneRank ? kv : this.#shardOf(kv, rank.shard, span.count),
        );
      }),
    );
  }

  /**
   * Writes the KV of one layer of a span, `[KV head][token][2 * headDim]`. Takes `kv` over, and
   * resolves with the buffer of its bytes.
   */
  async writeLayer(span: TokenSpan, layer: number, kv: ArrayBuffer): Promise<ArrayBuffer> {
    const headBytes = span.count * contentBytes(this.#geometry);
    const [only, another] = this.#ranks;
    if (only !== undefined && another === undefined)
      return only.memory.scatter(only.rowsOf(span, [layer]), kv);
    await Promise.all(
      this.#ranks.map(async (rank) => {
        const { firstHead, headCount } = rank.shard;
        const part = kv.slice(firstHead * headBytes, (firstHead + headCount) * headBytes);
        await rank.memory.scatter(rank.rowsOf(span, [layer]), part);
      }),
    );
    return kv;
  }

  /** Reads the KV of a span. A head that several ranks hold is read from the first. */
  read(span: TokenSpan): Promise<ArrayBuffer> {
    return this.#readFrom(this.#replicas()[0] ?? [], span);
  }

  /**
   * Zeroes the blocks behind the first `tokens` tokens, so that no bytes of another request are
   * left there.
   */
  async zeroTail(blockIds: readonly number[], tokens: number): Promise<void> {
    const count = blockIds.length * this.config.blockSize - tokens;
    if (count <= 0) return;
    await Promise.all(this.#ranks.map((rank) => rank.zero({ blockIds, from: tokens, count })));
  }

  async zeroBlock(blockId: number): Promise<void> {
    const span = { blockIds: [blockId], from: 0, count: this.config.blockSize };
    await Promise.all(this.#ranks.map((rank) => rank.zero(span)));
  }

  blockAt(address: number): number | undefined {
    return this.#ranks.find((rank) => rank.contains(address))?.blockAt(address);
  }

  /**
   * SHA-256 of each `DIGEST_TOKENS` tokens of a span, in the order of `read`. The digests do not
   * depend on TP, block size or block ids, so that KV that was sent can be compared with KV that
   * was received.
   * @throws `KV_BLOCKS_MISMATCH` when ranks that hold the same head have different bytes.
   */
  async digests(span: TokenSpan): Promise<string[]> {
    const [first = [], ...others] = await Promise.all(
      this.#replicas().map(async (ranks) =>
        kvDigests(await this.#readFrom(ranks, span), this.#geometry, span.count),
      ),
    );
    for (const other of others) {
      const at = first.findIndex((digest, i) => digest !== other[i]);
      if (at < 0) continue;
      throw new KvError(
        "KV_BLOCKS_MISMATCH",
        "ranks that hold the same KV heads have different bytes",
        {
          details: { fromToken: span.from + at * DIGEST_TOKENS },
        },
      );
    }
    return first;
  }

  close(): void {
    for (const { memory } of this.#ranks) memory.close();
  }

  async #readFrom(ranks: readonly RankCache[], span: TokenSpan): Promise<ArrayBuffer> {
    const [only] = this.#ranks;
    if (this.#ranks.length === 1 && only !== undefined)
      return only.memory.gather(only.rowsOf(span));
    const all = new ArrayBuffer(kvBytes(this.#geometry, span.count));
    await Promise.all(
      ranks.map(async (rank) => {
        const part = new Uint8Array(await rank.memory.gather(rank.rowsOf(span)));
        for (const { inAll, inPart, length } of this.#shardRuns(rank.shard, span.count))
          new Uint8Array(all, inAll, length).set(part.subarray(inPart, inPart + length));
      }),
    );
    return all;
  }

  #shardOf(kv: ArrayBuffer, shard: KvShard, count: number): ArrayBuffer {
    const part = new Uint8Array((kv.byteLength / this.#geometry.kvHeads) * shard.headCount);
    for (const { inAll, inPart, length } of this.#shardRuns(shard, count))
      part.set(new Uint8Array(kv, inAll, length), inPart);
    return part.buffer;
  }

  /**
   * Where each layer of a rank's shard lies in the buffer of all heads and in the rank's own; its
   * heads are adjacent within a layer.
   */
  #shardRuns(shard: KvShard, count: number) {
    const { kvHeads } = this.#geometry;
    const headBytes = count * contentBytes(this.#geometry);
    const length = shard.headCount * headBytes;
    return layersOf(this.#geometry).map((layer) => ({
      inAll: (layer * kvHeads + shard.firstHead) * headBytes,
      inPart: layer * length,
      length,
    }));
  }

  /**
   * Sets of ranks that hold every head exactly once: the first replica of each head, the second,
   * and so on.
   */
  #replicas(): RankCache[][] {
    const primaries = this.#ranks.filter(({ shard }) => shard.primary).length;
    const copies = this.#ranks.length / primaries;
    return Array.from({ length: copies }, (_, copy) =>
      this.#ranks.filter(({ shard }) => shard.rank % copies === copy),
    );
  }
}

class RankCache {
  readonly shard: KvShard;
  readonly memory: Memory;
  readonly caches: KvCaches;
  readonly #geometry: KvGeometry;
  readonly #numBlocks: number;
  readonly #blockSize: number;
  readonly #blockLengthBytes: number;
  readonly #layerBytes: number;

  constructor(
    shard: KvShard,
    config: KvCacheConfig,
    { transport, geometry, numBlocks, blockSize, memory: kind, openCaches }: KvPoolOptions,
  ) {
    this.shard = shard;
    this.#geometry = geometry;
    this.#numBlocks = numBlocks;
    this.#blockSize = blockSize;
    this.#blockLengthBytes = shard.headCount * blockSize * contentBytes(geometry);
    this.#layerBytes = numBlocks * this.#blockLengthBytes;
    if (openCaches !== undefined) {
      this.caches = openCaches({ config, numBlocks, numHeads: shard.headCount });
      const [region] = this.caches.regions;
      if (region === undefined) throw new KvError("KV_INTERNAL", "a rank's caches have no region");
      this.memory = region.memory;
      return;
    }
    const where = kind && { memoryType: kind.memoryType, deviceId: kind.deviceOf(shard.rank) };
    const memory = transport.allocate(geometry.layers * this.#layerBytes, where);
    this.memory = memory;
    this.caches = {
      config,
      regions: layersOf(geometry).map((layer) => ({
        name: layerName(layer),
        memory,
        offsetBytes: layer * this.#layerBytes,
        numBlocks,
        blockLengthBytes: this.#blockLengthBytes,
        blockStrideBytes: this.#blockLengthBytes,
        groupId: 0,
        memoryType: memory.memoryType,
      })),
    };
  }

  /** Rows `[offset, length]` of a span, ordered by layer, head and token. Default: all layers. */
  rowsOf({ blockIds, from, count }: TokenSpan, layers = layersOf(this.#geometry)): Float64Array {
    this.#checkSpan(blockIds, from, count);
    const pieces: { block: number; begin: number; length: number }[] = [];
    for (let token = from; token < from + count; ) {
      const begin = token % this.#blockSize;
      const length = Math.min(this.#blockSize - begin, from + count - token);
      pieces.push({ block: blockIds[Math.floor(token / this.#blockSize)] ?? 0, begin, length });
      token += length;
    }
    const content = contentBytes(this.#geometry);
    const { regions } = this.caches;
    const isSplit = regions.length === 2 * this.#geometry.layers;
    const { headCount } = this.shard;
    const rows = new Float64Array(
      2 * layers.length * headCount * (isSplit ? 2 * count : pieces.length),
    );
    let at = 0;
    const push = (offset: number, length: number) => {
      rows[at++] = offset;
      rows[at++] = length;
    };
    for (const layer of layers) {
      const keysAndValues = regions.slice(2 * layer, 2 * layer + 2);
      for (let head = 0; head < headCount; head++) {
        for (const { block, begin, length } of pieces) {
          if (!isSplit) {
            const base = layer * this.#layerBytes + head * this.#blockSize * content;
            push(base + block * this.#blockLengthBytes + begin * content, length * content);
            continue;
          }
          // K and V of a token lie in separate regions; the model has them next to each other.
          const half = content / 2;
          for (let token = begin; token < begin + length; token++) {
            for (const { offsetBytes, blockStrideBytes } of keysAndValues)
              push(
                offsetBytes + block * blockStrideBytes + (head * this.#blockSize + token) * half,
                half,
              );
          }
        }
      }
    }
    return rows;
  }

  async zero(span: TokenSpan): Promise<void> {
    const rows = this.rowsOf(span);
    let total = 0;
    for (let i = 1; i < rows.length; i += 2) total += rows[i] ?? 0;
    if (total > 0) await this.memory.scatter(rows, new ArrayBuffer(total));
  }

  contains(address: number): boolean {
    const { address: begin, lengthBytes } = this.memory;
    return address >= begin && address < begin + lengthBytes;
  }

  blockAt(address: number): number {
    return Math.floor(
      ((address - this.memory.address) % this.#layerBytes) / this.#blockLengthBytes,
    );
  }

  #checkSpan(blockIds: readonly number[], from: number, count: number): void {
    const blockSize = this.#blockSize;
    if (from < 0 || count < 0 || from + count > blockIds.length * blockSize) {
      throw new KvError(
        "KV_BLOCKS_MISMATCH",
        `tokens ${from} to ${from + count} lie outside of ${blockIds.length} blocks of ${blockSize} tokens`,
        { details: { from, count, blocks: blockIds.length, blockSize } },
      );
    }
    const bad = blockIds.find((id) => !Number.isInteger(id) || id < 1 || id >= this.#numBlocks);
    if (bad !== undefined) {
      throw new KvError(
        "KV_BLOCKS_OUT_OF_RANGE",
        `block ${bad} is not one of 1 to ${this.#numBlocks - 1}`,
        {
          details: { block: bad, numBlocks: this.#numBlocks },
        },
      );
    }
  }
}

function layersOf({ layers }: KvGeometry): number[] {
  return Array.from({ length: layers }, (_, layer) => layer);
}
