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
  /** Opens a rank's caches in one `Memory`, with one region per layer, or K and V in two. */
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
 * The paged KV cache of one instance. Each rank has one allocation with a region per layer of shape
 * `[numBlocks, heads of the rank, blockSize, 2 * headDim]` float32 (layout LBHNC, K then V in the
 * last dimension). `read` and `write` use `[layer][KV head][token][2 * headDim]` over all heads.
 * The JavaScript thread only interleaves the shards of the ranks.
 */
export class KvPool {
  readonly config: KvCacheConfig;
  readonly caches: readonly KvCaches[];
  readonly #geometry: KvGeometry;
  readonly #layers: readonly number[];
  readonly #ranks: readonly RankCache[];

  constructor(options: KvPoolOptions) {
    const { geometry, blockSize, tp, cacheKind = "full", attentionBackend = "PLAIN" } = options;
    this.#geometry = geometry;
    this.#layers = Array.from({ length: geometry.layers }, (_, layer) => layer);
    this.config = {
      groups: [{ kind: cacheKind, layerNames: this.#layers.map(layerName) }],
      blockSize,
      physicalBlocksPerLogical: 1,
      numKvHeads: geometry.kvHeads,
      headSize: geometry.headDim,
      numHiddenLayers: geometry.layers,
      dtype: "torch.float32",
      cacheDtype: "auto",
      layout: "LBHNC",
      attentionBackend,
    };
    this.#ranks = kvShards(geometry.kvHeads, tp).map(
      (shard) => new RankCache(shard, this.config, options),
    );
    this.caches = this.#ranks.map(({ caches }) => caches);
  }

  /** Takes `kv` over, and resolves with the buffer of its bytes. */
  async write(span: TokenSpan, kv: ArrayBuffer, layers = this.#layers): Promise<ArrayBuffer> {
    const expected = kvBytes({ ...this.#geometry, layers: layers.length }, span.count);
    if (kv.byteLength !== expected) {
      throw new KvError(
        "KV_BLOCKS_MISMATCH",
        `KV of ${span.count} tokens has ${expected} bytes; ${kv.byteLength} were given`,
        { details: { tokens: span.count, expected, given: kv.byteLength } },
      );
    }
    const [only, another] = this.#ranks;
    if (only !== undefined && another === undefined)
      return only.memory.scatter(only.rowsOf(span, layers), kv);
    const all = new Uint8Array(kv);
    await Promise.all(
      this.#ranks.map(async (rank) => {
        const part = new Uint8Array((kv.byteLength / this.#geometry.kvHeads) * rank.headCount);
        for (const { inAll, inPart, length } of this.#shardRuns(rank, span.count, layers.length))
          part.set(all.subarray(inAll, inAll + length), inPart);
        await rank.memory.scatter(rank.rowsOf(span, layers), part.buffer);
      }),
    );
    return kv;
  }

  /** Of all layers and heads of a block. */
  get blockBytes(): number {
    return kvBytes(this.#geometry, this.config.blockSize);
  }

  /** A head that several ranks hold is read from the first. */
  read(span: TokenSpan): Promise<ArrayBuffer> {
    return this.#readFrom(this.#replicas()[0] ?? [], span);
  }

  /** Zeroes what another request left behind the first `tokens` tokens. */
  async zeroTail(blockIds: readonly number[], tokens: number): Promise<void> {
    const count = blockIds.length * this.config.blockSize - tokens;
    if (count > 0) await this.#zero({ blockIds, from: tokens, count });
  }

  zeroBlock(blockId: number): Promise<void> {
    return this.#zero({ blockIds: [blockId], from: 0, count: this.config.blockSize });
  }

  async #zero(span: TokenSpan): Promise<void> {
    await this.write(span, new ArrayBuffer(kvBytes(this.#geometry, span.count)));
  }

  /**
   * The digests do not depend on TP, block size or block ids, so that sent and received KV can be
   * compared.
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
        { details: { fromToken: span.from + at * DIGEST_TOKENS } },
      );
    }
    return first;
  }

  close(): void {
    for (const { memory } of this.#ranks) memory.close();
  }

  async #readFrom(ranks: readonly RankCache[], span: TokenSpan): Promise<ArrayBuffer> {
    const gather = (rank: RankCache) => rank.memory.gather(rank.rowsOf(span, this.#layers));
    const [only, another] = this.#ranks;
    if (only !== undefined && another === undefined) return gather(only);
    const all = new Uint8Array(kvBytes(this.#geometry, span.count));
    await Promise.all(
      ranks.map(async (rank) => {
        const part = new Uint8Array(await gather(rank));
        for (const { inAll, inPart, length } of this.#shardRuns(rank, span.count))
          all.set(part.subarray(inPart, inPart + length), inAll);
      }),
    );
    return all.buffer;
  }

  /** Where each layer of a rank lies in the buffer of all heads and in its own. */
  #shardRuns({ headCount, firstHead }: RankCache, count: number, layers = this.#layers.length) {
    const { kvHeads } = this.#geometry;
    const headBytes = count * contentBytes(this.#geometry);
    const length = headCount * headBytes;
    return Array.from({ length: layers }, (_, layer) => ({
      inAll: (layer * kvHeads + firstHead) * headBytes,
      inPart: layer * length,
      length,
    }));
  }

  /** Sets of ranks that hold every head exactly once. */
  #replicas(): RankCache[][] {
    const copies = Math.max(1, this.#ranks.length / this.#geometry.kvHeads);
    return Array.from({ length: copies }, (_, copy) =>
      this.#ranks.filter((_, rank) => rank % copies === copy),
    );
  }
}

class RankCache {
  readonly firstHead: number;
  readonly headCount: number;
  readonly memory: Memory;
  readonly caches: KvCaches;
  readonly #options: KvPoolOptions;

  constructor(
    { rank, firstHead, headCount }: KvShard,
    config: KvCacheConfig,
    options: KvPoolOptions,
  ) {
    const { transport, geometry, numBlocks, blockSize, memory: kind, openCaches } = options;
    this.firstHead = firstHead;
    this.headCount = headCount;
    this.#options = options;
    const blockLengthBytes = headCount * blockSize * contentBytes(geometry);
    if (openCaches !== undefined) {
      this.caches = openCaches({ config, numBlocks, numHeads: headCount });
      const [region] = this.caches.regions;
      if (region === undefined) throw new KvError("KV_INTERNAL", "a rank's caches have no region");
      this.memory = region.memory;
      return;
    }
    const where = kind && { memoryType: kind.memoryType, deviceId: kind.deviceOf(rank) };
    const layerBytes = numBlocks * blockLengthBytes;
    const memory = transport.allocate(geometry.layers * layerBytes, where);
    this.memory = memory;
    this.caches = {
      config,
      regions: config.groups.flatMap(({ layerNames }) =>
        layerNames.map((name, layer) => ({
          name,
          memory,
          offsetBytes: layer * layerBytes,
          numBlocks,
          blockLengthBytes,
          blockStrideBytes: blockLengthBytes,
          groupId: 0,
          memoryType: memory.memoryType,
        })),
      ),
    };
  }

  /** Rows `[offset, length]` of a span, ordered by layer, head and token. */
  rowsOf(span: TokenSpan, layers: readonly number[]): Float64Array {
    this.#checkSpan(span);
    const { blockIds, from, count } = span;
    const { geometry, blockSize } = this.#options;
    const { regions } = this.caches;
    const content = contentBytes(geometry);
    // K and V of a token lie in separate regions; the model has them next to each other.
    const isSplit = regions.length === 2 * geometry.layers;
    const regionsPerLayer = isSplit ? 2 : 1;
    const width = content / regionsPerLayer;
    const pieceTokens = isSplit ? 1 : blockSize;
    const rows: number[] = [];
    for (const layer of layers) {
      const ofLayer = regions.slice(regionsPerLayer * layer, regionsPerLayer * (layer + 1));
      for (let head = 0; head < this.headCount; head++) {
        for (let token = from; token < from + count; ) {
          const begin = token % blockSize;
          const length = Math.min(pieceTokens - (begin % pieceTokens), from + count - token);
          const block = blockIds[Math.floor(token / blockSize)] ?? 0;
          for (const { offsetBytes, blockStrideBytes } of ofLayer) {
            const inBlock = (head * blockSize + begin) * width;
            rows.push(offsetBytes + block * blockStrideBytes + inBlock, length * width);
          }
          token += length;
        }
      }
    }
    return new Float64Array(rows);
  }

  #checkSpan({ blockIds, from, count }: TokenSpan): void {
    const { blockSize, numBlocks } = this.#options;
    if (from < 0 || count < 0 || from + count > blockIds.length * blockSize) {
      throw new KvError(
        "KV_BLOCKS_MISMATCH",
        `tokens ${from} to ${from + count} lie outside of ${blockIds.length} blocks of ${blockSize} tokens`,
        { details: { from, count, blocks: blockIds.length, blockSize } },
      );
    }
    const bad = blockIds.find((id) => !Number.isInteger(id) || id < 1 || id >= numBlocks);
    if (bad !== undefined) {
      throw new KvError(
        "KV_BLOCKS_OUT_OF_RANGE",
        `block ${bad} is not one of 1 to ${numBlocks - 1}`,
        {
          details: { block: bad, numBlocks },
        },
      );
    }
  }
}
