import {
  type KvEventIndex,
  type KvEventSource,
  KvEventStream,
  kvEventTurns,
  type RemovedBlocks,
  type Steps,
  type StoredBlocks,
} from "@kv/fleet";
import { type Clock, KvError, type Log } from "@kv/interface";
import { type BlockHashAlgorithm, blockHashes, offloadKey, type Tier } from "@kv/tier";
import type { BlockPool } from "./block-pool.js";

/** A vLLM server whose blocks are copied. */
export interface Engine {
  /** `host:port` of its P2P tier. */
  readonly peerId: string;
  /** Where it publishes KV events (`--kv-events-config`). */
  readonly events: KvEventSource;
}

export interface CopierOptions {
  readonly engines: readonly Engine[];
  readonly tier: Tier;
  readonly pool: BlockPool;
  readonly hashSeed: string;
  /** As vLLM's `--prefix-caching-hash-algo`. */
  readonly hashAlgorithm: BlockHashAlgorithm;
  /** Blocks of the engine in a block of its offloading tier. */
  readonly blocksPerChunk: number;
  /** Copies prefixes that engines store for the first time, too. */
  readonly writeThrough: boolean;
  /** Prefixes that are read at a time, from all engines. */
  readonly maxCopies: number;
  readonly clock: Clock;
  readonly log: Log;
}

/** What a copier has done. */
export interface CopierStatus {
  readonly copied: number;
  readonly waiting: number;
  readonly failed: number;
  /** Prefixes that were not copied because too many waited. */
  readonly dropped: number;
  /** Blocks whose place in a prompt is not known. */
  readonly unknown: number;
}

/** A block that an engine has announced. */
interface SeenBlock {
  readonly hash: Uint8Array;
  readonly before: SeenBlock | undefined;
  /** 1 for the first block of a prompt. */
  readonly depth: number;
  readonly group: number;
  stored: number;
  /** The engine that stored it last. */
  peerId: string;
}

const MAX_SEEN = 2 ** 18;
const MAX_WAITING = 1024;
/** Read before the ones after them: memory of blocks that are being written is in use. */
const ROUND_BLOCKS = 32;

/**
 * Copies prefixes out of engines. A prefix is worth it when an engine has stored it a second time,
 * or drops it from the accelerator: its offloading tier is then the last place that has it.
 */
export class Copier {
  readonly #options: CopierOptions;
  readonly #streams: ReadonlyMap<string, KvEventStream<KvEventIndex>>;
  /** By group and the hash of the event, oldest first. */
  readonly #seen = new Map<string, SeenBlock>();
  /** The last blocks of prefixes, and the engine that has them. */
  readonly #wanted = new Map<SeenBlock, string>();
  readonly #closing = new AbortController();
  readonly #copies = new Set<Promise<void>>();
  #counts = { copied: 0, failed: 0, dropped: 0, unknown: 0 };
  /** Tokens in a block of the engines, from their events. */
  #blockSize: number | undefined;

  constructor(options: CopierOptions) {
    this.#options = options;
    const { engines, clock, log } = options;
    const turns = kvEventTurns(clock);
    this.#streams = new Map(
      engines.map(({ peerId, events }) => [
        peerId,
        new KvEventStream(events, this.#indexOf(peerId), { clock, log, turns }),
      ]),
    );
  }

  status(): CopierStatus & { readonly engines: readonly object[] } {
    const engines = Array.from(this.#streams, ([peer, stream]) => {
      const { endpoint, state, reason } = stream.status();
      return { peer, endpoint, state, reason };
    });
    return { ...this.#counts, waiting: this.#wanted.size, engines };
  }

  get blockSize(): number | undefined {
    return this.#blockSize;
  }

  /**
   * Copies the prefixes of an engine, the last ones first. Resolves when it has tried all.
   * @throws `KV_REQUEST_INVALID` for an engine that is not one of this copier's.
   */
  async copyAll(peerId: string): Promise<void> {
    if (!this.#streams.has(peerId)) {
      const known = [...this.#streams.keys()].join(", ") || "none";
      throw new KvError(
        "KV_REQUEST_INVALID",
        `no engine ${JSON.stringify(peerId)} is copied from`,
        {
          hint: `the engines are ${known} (--engine)`,
        },
      );
    }
    const covered = new Set<SeenBlock>();
    for (const block of [...this.#seen.values()].reverse()) {
      if (block.peerId !== peerId || covered.has(block)) continue;
      for (let each = block.before; each !== undefined && !covered.has(each); each = each.before)
        covered.add(each);
      if (!this.#closing.signal.aborted) await this.#begin(block, peerId);
    }
  }

  /** Ends the copies that are under way. */
  async close(): Promise<void> {
    this.#closing.abort(new KvError("KV_TRANSFER_ABORTED", "the pool takes no more blocks"));
    this.#wanted.clear();
    for (const stream of this.#streams.values()) stream.close();
    await Promise.all(this.#copies);
  }

  #indexOf(peerId: string): KvEventIndex {
    const seen = this.#seen;
    const index = {
      get size() {
        return seen.size;
      },
      refused: 0,
      contradictions: 0,
      stored: (blocks: StoredBlocks) => this.#stored(peerId, blocks, index),
      removed: (blocks: RemovedBlocks) => this.#removed(peerId, blocks),
      *cleared(): Steps {},
    };
    return index;
  }

  *#stored(
    peerId: string,
    { hashes, parent, tokens, blockSize, lookahead, group }: StoredBlocks,
    index: { contradictions: number },
  ): Steps {
    const { hashSeed: seed, hashAlgorithm: algorithm, writeThrough } = this.#options;
    let before = parent === undefined ? undefined : this.#seen.get(`${group.index} ${parent}`);
    const isPlaced = parent === undefined || before !== undefined;
    if (!isPlaced || lookahead !== undefined || tokens.length !== hashes.length * blockSize) {
      this.#counts.unknown += hashes.length;
      return;
    }
    this.#blockSize = blockSize;
    let wanted: SeenBlock | undefined;
    for (const [at, name] of hashes.entries()) {
      yield;
      const ids = Array.prototype.slice.call(tokens, at * blockSize, (at + 1) * blockSize);
      const [hash] = blockHashes(ids, { blockSize, algorithm, seed, after: before?.hash });
      if (hash === undefined || !namesOf(hash).includes(name)) {
        // Another seed or algorithm, or a block with keys that the event does not tell.
        index.contradictions += 1;
        return;
      }
      before = this.#see(`${group.index} ${name}`, {
        hash,
        before,
        depth: (before?.depth ?? 0) + 1,
        group: group.index,
        stored: 0,
        peerId,
      });
      before.stored += 1;
      before.peerId = peerId;
      if (writeThrough || before.stored > 1) wanted = before;
    }
    if (wanted !== undefined) this.#want(wanted, peerId);
  }

  *#removed(peerId: string, { hashes, group }: RemovedBlocks): Steps {
    for (const name of hashes) {
      yield;
      const block = this.#seen.get(`${group} ${name}`);
      if (block !== undefined) this.#want(block, peerId);
    }
  }

  #see(name: string, block: SeenBlock): SeenBlock {
    const seen = this.#seen.get(name) ?? block;
    this.#seen.delete(name);
    this.#seen.set(name, seen);
    const [oldest] = this.#seen.keys();
    if (this.#seen.size > MAX_SEEN && oldest !== undefined) this.#seen.delete(oldest);
    return seen;
  }

  #want(block: SeenBlock, peerId: string): void {
    if (this.#wanted.size >= MAX_WAITING) {
      this.#counts.dropped += 1;
      return;
    }
    this.#wanted.set(block, peerId);
    this.#copyNext();
  }

  #copyNext(): void {
    const [next] = this.#wanted;
    if (next === undefined || this.#copies.size >= this.#options.maxCopies) return;
    const [block, peerId] = next;
    this.#wanted.delete(block);
    void this.#begin(block, peerId).then(() => this.#copyNext());
  }

  #begin(block: SeenBlock, peerId: string): Promise<void> {
    const copy = this.#copy(block, peerId).finally(() => this.#copies.delete(copy));
    this.#copies.add(copy);
    return copy;
  }

  async #copy(block: SeenBlock, peerId: string): Promise<void> {
    const { tier, pool, log } = this.#options;
    const keys = this.#keysOf(block);
    const first = keys.findIndex((key) => !pool.has(key));
    if (first < 0) return;
    let parent = keys[first - 1];
    let isWhole = true;
    try {
      for (let at = first; isWhole && at < keys.length; at += ROUND_BLOCKS) {
        const round = keys.slice(at, at + ROUND_BLOCKS);
        const puts: Promise<boolean>[] = [];
        const take = (key: Uint8Array, bytes: Uint8Array) => {
          puts.push(pool.put(key, parent, bytes));
          parent = key;
        };
        const { signal } = this.#closing;
        // What came before an error is kept, too.
        const read = tier.read(peerId, round, take, { signal }).finally(() => Promise.all(puts));
        isWhole = (await read) === round.length;
        this.#counts.copied += (await Promise.all(puts)).filter(Boolean).length;
      }
    } catch (error) {
      this.#counts.failed += 1;
      log.warn("pool-copy-failed", { peer: peerId, error });
    }
  }

  /** Keys of the prefix that ends here, in the engine's offloading tier. */
  #keysOf(block: SeenBlock): Uint8Array[] {
    const { blocksPerChunk } = this.#options;
    const keys: Uint8Array[] = [];
    for (let each: SeenBlock | undefined = block; each !== undefined; each = each.before)
      if (each.depth % blocksPerChunk === 0) keys.push(offloadKey(each.hash, each.group));
    return keys.reverse();
  }
}

/** What an event calls a hash: all its bytes, or the last 64 bits (vLLM's default). */
function namesOf(hash: Uint8Array): string[] {
  const bytes = Buffer.from(hash);
  return [bytes.toString("base64"), String(bytes.readBigUInt64BE(bytes.length - 8))];
}
