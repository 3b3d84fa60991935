import type { Memory } from "@kv/interface";
import { type Disk, HEADER_BYTES } from "../src/block-file.js";

/** What is on a disk, by place. */
export type Content = { header: Uint8Array; bytes: Uint8Array }[];

/** A disk that loses part of what was not synced, as one does when the power goes. */
export class TornDisk implements Disk {
  readonly content: Content;
  /** Bytes changed while a header on the disk named them. */
  isOverwritten = false;
  /** What a write rejects with. */
  error: Error | undefined;
  readonly #memory: Memory;
  readonly #lengthBytes: number;
  /** Each may be lost alone. */
  #unsynced: (() => void)[] = [];
  #isCrashed = false;

  constructor(memory: Memory, lengthBytes: number, places: number, content?: Content) {
    this.#memory = memory;
    this.#lengthBytes = lengthBytes;
    this.content =
      content ??
      Array.from({ length: places }, () => {
        return { header: new Uint8Array(HEADER_BYTES), bytes: new Uint8Array(lengthBytes) };
      });
  }

  get places(): number {
    return this.content.length;
  }

  header(place: number): Uint8Array {
    return this.#at(place).header;
  }

  async writeHeader(place: number, bytes: Uint8Array): Promise<void> {
    const header = Uint8Array.from(bytes);
    await this.#write(() => this.#at(place).header.set(header));
  }

  async write(place: number, slot: number): Promise<void> {
    const half = this.#lengthBytes / 2;
    if (!this.#isCrashed && this.header(place).some((byte) => byte !== 0))
      this.isOverwritten = true;
    const bytes = Uint8Array.from(this.#slot(slot));
    await this.#write(() => this.#at(place).bytes.set(bytes.subarray(0, half)));
    await this.#write(() => this.#at(place).bytes.set(bytes.subarray(half), half));
  }

  async read(places: readonly number[], slots: readonly number[]): Promise<void> {
    await Promise.resolve();
    for (const write of this.#unsynced.splice(0)) write();
    for (const [at, place] of places.entries())
      this.#slot(slots[at] ?? 0).set(this.#at(place).bytes);
  }

  async sync(): Promise<void> {
    const written = this.#unsynced.splice(0);
    await Promise.resolve();
    for (const write of written) write();
  }

  async close(): Promise<void> {}

  /** What is on the disk afterwards: of unsynced writes, some. */
  crash(seed: number): Content {
    this.#isCrashed = true;
    let random = seed;
    for (const write of this.#unsynced.splice(0)) {
      random = (random * 1103515245 + 12345) % 2 ** 31;
      if (random > 2 ** 30) write();
    }
    return structuredClone(this.content);
  }

  async #write(write: () => void): Promise<void> {
    await Promise.resolve();
    if (this.error !== undefined) throw this.error;
    this.#unsynced.push(write);
  }

  #at(place: number): Content[number] {
    return this.content[place] as Content[number];
  }

  #slot(slot: number): Uint8Array {
    return this.#memory.view(slot * this.#lengthBytes, this.#lengthBytes);
  }
}
