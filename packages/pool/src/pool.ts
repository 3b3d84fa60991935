import { join } from "node:path";
import {
  type AmbientOptions,
  ambient,
  type Clock,
  KvError,
  type Memory,
  type Timer,
  type Transport,
} from "@kv/interface";
import type { HandshakeKeys } from "@kv/side-channel";
import { type BlockHashAlgorithm, type Namespace, openTier, type Tier } from "@kv/tier";
import type { ChangesPage } from "./block-changes.js";
import { BlockFile, blockFileName, type Disk } from "./block-file.js";
import { BlockPool, type BlockPoolStatus } from "./block-pool.js";
import { Copier, type CopierStatus, type Engine } from "./copier.js";
import { openNixlDisk } from "./nixl-disk.js";
import { type ObjectStore, openObjectDisk } from "./object-disk.js";

/** Options of `openPool`. */
export interface PoolOptions extends AmbientOptions, Namespace {
  /** Moves blocks to and from engines, and files. The caller closes it. */
  readonly transport: Transport;
  /** An address of this host that engines can dial; with the port, the pool's name. */
  readonly host: string;
  /** 0 takes a free port. */
  readonly port: number;
  /** Host memory for blocks. */
  readonly memoryBytes: number;
  /** Blocks are also kept in files, through NIXL's backend POSIX. @default memory only */
  readonly files?: { readonly folder: string; readonly limitBytes: number } | undefined;
  /** Blocks are kept in an object store instead, through NIXL's backend OBJ. @default none */
  readonly objects?: ObjectStore | undefined;
  /** Engines whose blocks are copied. @default none */
  readonly engines?: readonly Engine[] | undefined;
  /** vLLM's `--prefix-caching-hash-algo`. @default "sha256" */
  readonly hashAlgorithm?: BlockHashAlgorithm | undefined;
  /** Blocks of the accelerator in a block of vLLM's offloading tier. @default 1 */
  readonly blocksPerChunk?: number | undefined;
  /**
   * Copies all that engines store, not only what they store again or drop: a router finds it as
   * soon as an engine is gone.
   * @default false
   */
  readonly writeThrough?: boolean | undefined;
  /** Prefixes that are copied at a time. @default 2 */
  readonly maxCopies?: number | undefined;
  /** Encrypts the side channel, and so refuses plain vLLM. */
  readonly handshakeKeys?: HandshakeKeys | undefined;
}

/** A pool's state. */
export interface PoolStatus extends BlockPoolStatus, CopierStatus {
  /** What a request's `remote_kv_source` names. */
  readonly peer_id: string;
  readonly draining: boolean;
  readonly block_length_bytes: number;
  readonly fingerprint: string;
  readonly hash_seed: string;
  readonly peers: readonly string[];
  /** Blocks that peers looked up, and the pool had. */
  readonly found: number;
  readonly missing: number;
  readonly engines: readonly object[];
}

/** What a router asks for again and again, to know which prefixes a pool has. */
export interface PoolContent extends ChangesPage {
  /** What a request's `remote_kv_source` names. */
  readonly peer_id: string;
  readonly draining: boolean;
  readonly hash_seed: string;
  readonly hash_algorithm: BlockHashAlgorithm;
  /** Tokens that an engine hashes together; null before an engine has announced a block. */
  readonly block_size: number | null;
  /** Of which a block of the pool has so many. */
  readonly blocks_per_chunk: number;
}

/** Blocks that outlive the engine that computed them. */
export interface Pool {
  /** What a request's `remote_kv_source` names. */
  readonly localId: string;
  readonly blocks: BlockPool;
  status(): PoolStatus;
  /**
   * Copies all that an engine has announced and this pool lacks, before the engine ends. Resolves
   * with the number of blocks that were copied, at the latest after the time.
   */
  copyFrom(peerId: string, timeoutMs: number): Promise<number>;
  /** `epoch` and `after`: those of the last page, or "" and 0. */
  content(epoch: string, after: number): PoolContent;
  /** Copies and finds nothing more. Resolves when no peer holds a block, or after the time. */
  drain(timeoutMs: number): Promise<void>;
  /** Ends all sessions, and waits for what is being written. */
  close(): Promise<void>;
}

/**
 * Opens a pool of KV blocks that plain vLLM 0.33 servers use by their P2P tier.
 * @throws `KV_CONFIG_INVALID`, `KV_MEMORY_INVALID`, `KV_SIDE_CHANNEL_BIND_FAILED`, the errors of
 * the transport.
 */
export async function openPool(options: PoolOptions): Promise<Pool> {
  const { transport, memoryBytes, blockLengthBytes, fingerprint, hashSeed } = options;
  const { clock, log } = ambient(options);
  const slots = Math.floor(memoryBytes / blockLengthBytes);
  if (slots < 1)
    throw new KvError(
      "KV_CONFIG_INVALID",
      `a memory of ${memoryBytes} bytes has no block of ${blockLengthBytes} bytes`,
    );
  const memory = transport.allocate(slots * blockLengthBytes);
  const closers: (() => unknown)[] = [() => memory.close()];
  const close = async () => {
    for (const each of closers.splice(0).reverse()) await each();
  };
  try {
    const namespace = { blockLengthBytes, fingerprint, hashSeed };
    const disk = await openDisk(options, memory);
    const file = disk && new BlockFile(disk, namespace);
    const blocks = new BlockPool({ memory, blockLengthBytes, file, log });
    closers.push(() => blocks.close());
    const store = new DrainingStore(blocks);
    const tier = await openTier({ ...options, memory, store });
    closers.push(() => tier.close());
    const { engines = [], hashAlgorithm = "sha256", blocksPerChunk = 1, maxCopies = 2 } = options;
    const { writeThrough = false } = options;
    const copier = new Copier({
      engines,
      tier,
      pool: blocks,
      hashSeed,
      hashAlgorithm,
      blocksPerChunk,
      writeThrough,
      maxCopies,
      clock,
      log,
    });
    closers.push(() => copier.close());
    const hashes = { hash_algorithm: hashAlgorithm, blocks_per_chunk: blocksPerChunk };
    return new OpenPool({ tier, blocks, store, copier, namespace, hashes, clock, close });
  } catch (error) {
    await close();
    throw error;
  }
}

async function openDisk(options: PoolOptions, memory: Memory): Promise<Disk | undefined> {
  const { transport, files, objects, blockLengthBytes } = options;
  const name = blockFileName(options);
  if (files !== undefined && objects !== undefined)
    throw new KvError("KV_CONFIG_INVALID", "a pool has files and objects", {
      hint: "give one of them",
    });
  if (objects !== undefined)
    return openObjectDisk({ ...objects, transport, memory, name, blockLengthBytes });
  if (files === undefined) return undefined;
  const { folder, limitBytes } = files;
  const path = join(folder, name);
  return openNixlDisk({ transport, memory, path, limitBytes, blockLengthBytes });
}

/** Counts what peers look up. While draining, it finds nothing. */
class DrainingStore {
  isDraining = false;
  found = 0;
  missing = 0;
  readonly #blocks: BlockPool;

  constructor(blocks: BlockPool) {
    this.#blocks = blocks;
  }

  async pin(keys: readonly Uint8Array[]): Promise<(number | undefined)[]> {
    const slots = this.isDraining ? keys.map(() => undefined) : await this.#blocks.pin(keys);
    const found = slots.filter((slot) => slot !== undefined).length;
    this.found += found;
    this.missing += keys.length - found;
    return slots;
  }

  unpin(slots: readonly number[]): void {
    this.#blocks.unpin(slots);
  }
}

interface OpenPoolParts {
  readonly tier: Tier;
  readonly blocks: BlockPool;
  readonly store: DrainingStore;
  readonly copier: Copier;
  readonly namespace: Namespace;
  readonly hashes: Pick<PoolContent, "hash_algorithm" | "blocks_per_chunk">;
  readonly clock: Clock;
  readonly close: () => Promise<void>;
}

const DRAIN_EVERY_MS = 20;

class OpenPool implements Pool {
  readonly #parts: OpenPoolParts;

  constructor(parts: OpenPoolParts) {
    this.#parts = parts;
  }

  get localId(): string {
    return this.#parts.tier.localId;
  }

  get blocks(): BlockPool {
    return this.#parts.blocks;
  }

  status(): PoolStatus {
    const { tier, blocks, store, copier, namespace } = this.#parts;
    const { blockLengthBytes, fingerprint, hashSeed } = namespace;
    return {
      peer_id: tier.localId,
      draining: store.isDraining,
      block_length_bytes: blockLengthBytes,
      fingerprint,
      hash_seed: hashSeed,
      ...blocks.status(),
      peers: tier.peers,
      found: store.found,
      missing: store.missing,
      ...copier.status(),
    };
  }

  async copyFrom(peerId: string, timeoutMs: number): Promise<number> {
    const { copier, clock } = this.#parts;
    const before = copier.status().copied;
    let timer: Timer | undefined;
    const late = new Promise<void>((resolve) => {
      timer = clock.setTimer(resolve, timeoutMs);
    });
    await Promise.race([copier.copyAll(peerId), late]);
    timer?.cancel();
    return copier.status().copied - before;
  }

  content(epoch: string, after: number): PoolContent {
    const { tier, blocks, store, copier, namespace, hashes } = this.#parts;
    return {
      peer_id: tier.localId,
      draining: store.isDraining,
      hash_seed: namespace.hashSeed,
      ...hashes,
      block_size: copier.blockSize ?? null,
      ...blocks.changes.page(epoch, after),
    };
  }

  async drain(timeoutMs: number): Promise<void> {
    const { store, copier, blocks, clock } = this.#parts;
    store.isDraining = true;
    await copier.close();
    const endMs = clock.now() + timeoutMs;
    while (blocks.status().pinned > 0 && clock.now() < endMs)
      await new Promise<void>((resolve) => {
        clock.setTimer(resolve, DRAIN_EVERY_MS, { ref: true });
      });
  }

  close(): Promise<void> {
    return this.#parts.close();
  }
}
