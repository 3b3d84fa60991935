import { createHash } from "node:crypto";
import { type AmbientOptions, ambient, KvError, type Memory, type Transport } from "@kv/interface";
import {
  type BlockStore,
  DEFAULT_HASH_SEED,
  type Namespace,
  offloadKey,
  openTier,
  type Tier,
} from "@kv/tier";
import { z } from "zod";
import { type BlockHash, type BlockPool, blockHashOf } from "./block-pool.js";
import type { KvPool } from "./kv-pool.js";

export interface CacheTierOptions extends AmbientOptions {
  readonly transport: Transport;
  readonly host: string;
  readonly port: number;
  readonly model: string;
  readonly pool: KvPool;
  readonly blocks: BlockPool;
  /** The most that a peer can fetch of one prompt. */
  readonly promptBlocks: number;
}

const paramsSchema = z.object({
  remote_kv_source: z
    .object({
      remote_host: z.string().regex(/^[\w.:-]{1,253}$/),
      remote_port: z.number().int().min(1).max(65_535),
    })
    .optional(),
});

/**
 * A member of vLLM's P2P tier that serves a prefix cache, and fills it from others. A block of the
 * tier has all layers and heads, whatever the TP.
 */
export class CacheTier implements BlockStore {
  readonly namespace: Namespace;
  readonly #options: CacheTierOptions;
  readonly #memory: Memory;
  readonly #blockBytes: number;
  readonly #slots: number;
  readonly #freeSlots: number[];
  #tier: Tier | undefined;

  private constructor(options: CacheTierOptions) {
    const { transport, pool, promptBlocks, model } = options;
    const { numHiddenLayers, numKvHeads, headSize, blockSize } = pool.config;
    const alike = JSON.stringify([model, numHiddenLayers, numKvHeads, headSize, blockSize]);
    this.namespace = {
      blockLengthBytes: pool.blockBytes,
      fingerprint: createHash("sha256").update(alike).digest("hex").slice(0, 16),
      hashSeed: DEFAULT_HASH_SEED,
    };
    this.#options = options;
    this.#blockBytes = pool.blockBytes;
    // A peer gets half of them.
    this.#slots = 2 * promptBlocks;
    this.#memory = transport.allocate(this.#slots * this.#blockBytes);
    this.#freeSlots = Array.from({ length: this.#slots }, (_, slot) => slot);
  }

  /** @throws `KV_SIDE_CHANNEL_BIND_FAILED`, the errors of the transport. */
  static async open(options: CacheTierOptions): Promise<CacheTier> {
    const store = new CacheTier(options);
    try {
      store.#tier = await openTier({
        ...options,
        ...store.namespace,
        store,
        memory: store.#memory,
        landingBlocks: options.promptBlocks,
      });
    } catch (error) {
      await store.close();
      throw error;
    }
    return store;
  }

  get localId(): string {
    return this.#tier?.localId ?? "";
  }

  /** Blocks that peers fetch. */
  get servedBlocks(): number {
    return this.#slots - this.#freeSlots.length;
  }

  /**
   * `host:port` of a request's `remote_kv_source`.
   * @throws `KV_REQUEST_INVALID`.
   */
  sourceOf(kvTransferParams: unknown): string | undefined {
    const { data, error } = paramsSchema.safeParse(kvTransferParams ?? {});
    if (data === undefined)
      throw new KvError("KV_REQUEST_INVALID", `kv_transfer_params: ${z.prettifyError(error)}`);
    const { remote_kv_source: source } = data;
    if (source === undefined) return undefined;
    const { remote_host: host, remote_port: port } = source;
    return host.includes(":") ? `[${host}]:${port}` : `${host}:${port}`;
  }

  /** Brings a prompt's blocks into the cache, as far as the source has them. Returns how many. */
  async fetch(
    source: string,
    {
      hashes,
      tokens,
    }: { readonly hashes: readonly BlockHash[]; readonly tokens: readonly number[] },
    signal: AbortSignal,
  ): Promise<number> {
    const { blocks, pool } = this.#options;
    const { log } = ambient(this.#options);
    const held = blocks.lookup(hashes);
    const known = held.length;
    const writes: Promise<unknown>[] = [];
    const take = (_: Uint8Array, bytes: Uint8Array) => {
      const blockIds = blocks.allocate(1);
      held.push(...blockIds);
      const span = { blockIds, from: 0, count: pool.config.blockSize };
      writes.push(pool.write(span, Uint8Array.from(bytes).buffer));
    };
    const keys = hashes.slice(known).map((hash) => offloadKey(Buffer.from(hash, "base64")));
    try {
      if (keys.length > 0) await this.#tier?.read(source, keys, take, { signal });
    } catch (error) {
      log.warn("kv-not-fetched", { source, error });
    }
    try {
      await Promise.all(writes);
      blocks.cachePrefix(held, hashes.slice(0, held.length), tokens);
      return held.length - known;
    } finally {
      await Promise.allSettled(writes);
      blocks.release(held);
    }
  }

  async pin(keys: readonly Uint8Array[]): Promise<(number | undefined)[]> {
    return Promise.all(keys.map((key) => this.#copied(key)));
  }

  unpin(slots: readonly number[]): void {
    this.#freeSlots.push(...slots);
  }

  /** Ends what peers fetch. */
  async close(): Promise<void> {
    await this.#tier?.close();
    this.#memory.close();
  }

  async #copied(key: Uint8Array): Promise<number | undefined> {
    const { blocks, pool } = this.#options;
    const blockIds = blocks.lookup([blockHashOf(key.subarray(0, -4))]);
    const slot = blockIds.length === 0 ? undefined : this.#freeSlots.pop();
    try {
      if (slot === undefined) return undefined;
      const kv = await pool.read({ blockIds, from: 0, count: pool.config.blockSize });
      this.#memory.view(slot * this.#blockBytes, this.#blockBytes).set(new Uint8Array(kv));
      return slot;
    } finally {
      blocks.release(blockIds);
    }
  }
}
