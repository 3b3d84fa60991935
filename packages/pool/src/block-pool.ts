import { crc32 } from "node:zlib";
import { type Log, type Memory, silentLog } from "@kv/interface";
import { type BlockStore, nameOf } from "@kv/tier";
import { BlockChanges } from "./block-changes.js";
import type { BlockFile, BlockHeader } from "./block-file.js";

/** Options of `BlockPool`. */
export interface BlockPoolOptions {
  /** Its slots are served. */
  readonly memory: Memory;
  readonly blockLengthBytes: number;
  /** Keeps all blocks; the memory then has those used last. The pool closes it. @default none */
  readonly file?: BlockFile | undefined;
  readonly log?: Log | undefined;
}

/** A pool's content, and its counters. */
export interface BlockPoolStatus {
  readonly blocks: number;
  readonly slots: number;
  readonly blocks_in_memory: number;
  readonly places: number;
  readonly blocks_in_file: number;
  readonly pinned: number;
  readonly evicted: number;
  /** Blocks of the file whose bytes were not those that were written. They were never served. */
  readonly damaged: number;
}

interface Block {
  readonly key: Uint8Array;
  readonly parent: Block | undefined;
  readonly checksum: number;
  children: number;
  pins: number;
  /** A prefix was used when its last block was: eviction moves it to the block before. */
  usedAt: number;
  slot: number | undefined;
  place: number | undefined;
  loading: Promise<void> | undefined;
  /** Whether a crash leaves it, and all before it. */
  kept: Promise<boolean>;
  /** Nobody finds it any more. The last pin frees its slot and place. */
  isGone: boolean;
}

/**
 * Blocks in memory and in a file; the least recently used leave first. A block leaves after all
 * that follow it, so prefixes stay whole.
 */
export class BlockPool implements BlockStore {
  readonly changes = new BlockChanges();
  readonly #memory: Memory;
  readonly #lengthBytes: number;
  readonly #file: BlockFile | undefined;
  readonly #log: Log;
  readonly #blocks = new Map<string, Block>();
  /** No block follows them. */
  readonly #leaves = new Set<Block>();
  /** In memory, least recently used first. */
  readonly #resident = new Set<Block>();
  readonly #bySlot: (Block | undefined)[];
  readonly #freeSlots: number[];
  readonly #freePlaces: number[] = [];
  readonly #writes = new Set<Promise<boolean>>();
  #time = 0;
  #pinned = 0;
  #evicted = 0;
  #damaged = 0;

  constructor({ memory, blockLengthBytes, file, log = silentLog }: BlockPoolOptions) {
    this.#memory = memory;
    this.#lengthBytes = blockLengthBytes;
    this.#file = file;
    this.#log = log;
    const slots = Math.floor(memory.lengthBytes / blockLengthBytes);
    this.#freeSlots = Array.from({ length: slots }, (_, at) => slots - 1 - at);
    this.#bySlot = new Array<Block | undefined>(slots).fill(undefined);
    if (file !== undefined) this.#recover(file.headers());
  }

  has(key: Uint8Array): boolean {
    return this.#blocks.has(nameOf(key));
  }

  /**
   * Copies a block in after `parent`, before it returns. True: it and its prefix are kept; where
   * there is a file, a crash leaves them. False: the pool has it or lacks its parent, all blocks
   * are pinned, or it is in memory only because the file could not be written.
   */
  async put(key: Uint8Array, parent: Uint8Array | undefined, bytes: Uint8Array): Promise<boolean> {
    const before = parent === undefined ? undefined : this.#blocks.get(nameOf(parent));
    if (this.has(key) || (parent !== undefined && before === undefined)) return false;
    const slot = this.#takeSlot(before);
    if (slot === undefined) return false;

    this.#view(slot).set(bytes);
    const checksum = checksumOf(key, this.#view(slot));
    const block = this.#add(key, before, checksum, undefined);
    this.#reside(block, slot);
    if (this.#file !== undefined) {
      block.kept = this.#write(this.#file, block);
      this.#writes.add(block.kept);
      void block.kept.then(() => this.#writes.delete(block.kept));
    }
    return block.kept;
  }

  async pin(keys: readonly Uint8Array[]): Promise<(number | undefined)[]> {
    const found = keys.map((key) => this.#blocks.get(nameOf(key)));
    const held = found.filter((block) => block !== undefined);
    for (const block of held) block.pins += 1;
    this.#pinned += held.length;
    this.#use(held);
    await this.#load(held);
    for (const block of held) if (block.slot === undefined) this.#unpin(block);
    return found.map((block) => block?.slot);
  }

  unpin(slots: readonly number[]): void {
    for (const slot of slots) {
      const block = this.#bySlot[slot];
      if (block !== undefined) this.#unpin(block);
    }
  }

  status(): BlockPoolStatus {
    const places = this.#file?.places ?? 0;
    return {
      blocks: this.#blocks.size,
      slots: this.#bySlot.length,
      blocks_in_memory: this.#resident.size,
      places,
      blocks_in_file: places - this.#freePlaces.length,
      pinned: this.#pinned,
      evicted: this.#evicted,
      damaged: this.#damaged,
    };
  }

  /** Waits for what is being written. Nothing may be pinned. */
  async close(): Promise<void> {
    await Promise.all(this.#writes);
    await this.#file?.close();
  }

  #recover(headers: readonly (BlockHeader | undefined)[]): void {
    const found = headers
      .flatMap((header, place) => (header === undefined ? [] : [{ ...header, place }]))
      .sort((one, other) => one.sequence - other.sequence);
    this.#time = found.at(-1)?.sequence ?? 0;
    for (const { key, parent, checksum, place } of found) {
      const known = this.#blocks.get(nameOf(key));
      const before = parent === undefined ? undefined : this.#blocks.get(nameOf(parent));
      // It was dropped and has come again.
      if (known !== undefined) Object.assign(known, { checksum, place });
      // Otherwise its prefix was not yet kept at a crash.
      else if (parent === undefined || before !== undefined)
        this.#add(key, before, checksum, place);
    }
    const used = new Set(Array.from(this.#blocks.values(), ({ place }) => place));
    for (let place = headers.length - 1; place >= 0; place -= 1)
      if (!used.has(place)) this.#freePlaces.push(place);
  }

  #add(
    key: Uint8Array,
    parent: Block | undefined,
    checksum: number,
    place: number | undefined,
  ): Block {
    const block: Block = {
      key: Uint8Array.from(key),
      parent,
      checksum,
      children: 0,
      pins: 0,
      usedAt: this.#tick(),
      slot: undefined,
      place,
      loading: undefined,
      kept: Promise.resolve(true),
      isGone: false,
    };
    if (parent !== undefined) {
      parent.children += 1;
      this.#leaves.delete(parent);
    }
    this.#leaves.add(block);
    this.#blocks.set(nameOf(key), block);
    this.changes.added(block.key);
    return block;
  }

  async #write(file: BlockFile, block: Block): Promise<boolean> {
    const { key, parent, checksum, usedAt: sequence, slot } = block;
    const place = this.#takePlace();
    if (place === undefined || slot === undefined) return false;
    block.pins += 1;
    block.place = place;
    try {
      await file.write(place, slot, { key, parent: parent?.key, checksum, sequence });
      return (await parent?.kept) ?? true;
    } catch (error) {
      this.#log.warn("pool-block-not-written", { error });
      block.place = undefined;
      this.#freePlaces.push(place);
      return false;
    } finally {
      block.pins -= 1;
      this.#freeGone(block);
    }
  }

  /** Brings blocks into memory. One that could not be brought has no slot. */
  async #load(blocks: readonly Block[]): Promise<void> {
    const places: number[] = [];
    const slots: number[] = [];
    const loaded: Block[] = [];
    for (const block of blocks) {
      if (block.slot !== undefined || block.loading !== undefined || block.place === undefined)
        continue;
      const slot = this.#takeSlot(undefined);
      if (slot === undefined) break;
      places.push(block.place);
      slots.push(slot);
      loaded.push(block);
      block.loading = Promise.resolve();
    }
    const loading = this.#read(loaded, places, slots);
    for (const block of loaded) block.loading = loading;
    await Promise.all(blocks.map((block) => block.loading));
  }

  async #read(
    blocks: readonly Block[],
    places: readonly number[],
    slots: readonly number[],
  ): Promise<void> {
    let isRead = true;
    try {
      if (blocks.length > 0) await this.#file?.read(places, slots);
    } catch (error) {
      isRead = false;
      this.#log.warn("pool-blocks-not-read", { blocks: blocks.length, error });
    }
    for (const [at, block] of blocks.entries()) {
      const slot = slots[at] as number;
      block.loading = undefined;
      if (isRead && checksumOf(block.key, this.#view(slot)) === block.checksum) {
        this.#reside(block, slot);
        continue;
      }
      this.#freeSlots.push(slot);
      if (isRead) this.#dropDamaged(block);
    }
  }

  #dropDamaged(block: Block): void {
    this.#damaged += 1;
    this.#log.error("pool-block-damaged", { place: block.place });
    this.#remove(block);
    // Those that follow come later in the map.
    for (const each of this.#blocks.values()) if (each.parent?.isGone) this.#remove(each);
  }

  /** The given block must stay. */
  #takeSlot(except: Block | undefined): number | undefined {
    if (this.#freeSlots.length === 0 && this.#file !== undefined)
      for (const block of this.#resident) {
        if (block.pins > 0 || block.place === undefined) continue;
        this.#leaveMemory(block);
        break;
      }
    if (this.#freeSlots.length === 0) this.#evict("slot", except);
    return this.#freeSlots.pop();
  }

  #takePlace(): number | undefined {
    if (this.#freePlaces.length === 0) this.#evict("place", undefined);
    return this.#freePlaces.pop();
  }

  #evict(what: "slot" | "place", except: Block | undefined): void {
    let oldest: Block | undefined;
    for (const block of this.#leaves) {
      if (block.pins > 0 || block === except || block[what] === undefined) continue;
      if (oldest === undefined || block.usedAt < oldest.usedAt) oldest = block;
    }
    if (oldest === undefined) return;
    this.#evicted += 1;
    this.#remove(oldest);
  }

  #remove(block: Block): void {
    const { parent } = block;
    block.isGone = true;
    this.#blocks.delete(nameOf(block.key));
    this.changes.removed(block.key);
    this.#leaves.delete(block);
    if (parent !== undefined) {
      parent.children -= 1;
      parent.usedAt = Math.max(parent.usedAt, block.usedAt);
      if (parent.children === 0 && !parent.isGone) this.#leaves.add(parent);
    }
    this.#freeGone(block);
  }

  #freeGone(block: Block): void {
    if (!block.isGone || block.pins > 0) return;
    this.#leaveMemory(block);
    if (block.place !== undefined) this.#freePlaces.push(block.place);
    block.place = undefined;
  }

  #reside(block: Block, slot: number): void {
    block.slot = slot;
    this.#bySlot[slot] = block;
    this.#resident.add(block);
  }

  #leaveMemory(block: Block): void {
    if (block.slot === undefined) return;
    this.#freeSlots.push(block.slot);
    this.#bySlot[block.slot] = undefined;
    this.#resident.delete(block);
    block.slot = undefined;
  }

  /** The beginning of a prefix, which others share, is used last. */
  #use(blocks: readonly Block[]): void {
    for (const block of [...blocks].reverse()) {
      block.usedAt = this.#tick();
      if (this.#resident.delete(block)) this.#resident.add(block);
    }
  }

  #unpin(block: Block): void {
    block.pins -= 1;
    this.#pinned -= 1;
    this.#freeGone(block);
  }

  #tick(): number {
    this.#time += 1;
    return this.#time;
  }

  #view(slot: number): Uint8Array {
    return this.#memory.view(slot * this.#lengthBytes, this.#lengthBytes);
  }
}

const checksumOf = (key: Uint8Array, bytes: Uint8Array): number => crc32(bytes, crc32(key));
