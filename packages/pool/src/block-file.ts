import { createHash } from "node:crypto";
import { crc32 } from "node:zlib";
import { decodeMsgpack, encodeMsgpack } from "@kv/protocol";
import type { Namespace } from "@kv/tier";
import { z } from "zod";

/** Where a file of blocks is: places with a header and a block each. */
export interface Disk {
  readonly places: number;
  header(place: number): Uint8Array;
  /** A crash leaves the old header or the new one: disks write a sector whole. */
  writeHeader(place: number, bytes: Uint8Array): Promise<void>;
  /** Copies a slot of the memory to a place. */
  write(place: number, slot: number): Promise<void>;
  read(places: readonly number[], slots: readonly number[]): Promise<void>;
  /** Resolves when a crash leaves all that was written before the call. */
  sync(): Promise<void>;
  close(): Promise<void>;
}

/** A block's record beside its bytes. */
export interface BlockHeader {
  readonly key: Uint8Array;
  /** Key of the block before it. */
  readonly parent: Uint8Array | undefined;
  /** CRC-32 of the key and the bytes. */
  readonly checksum: number;
  /** Later blocks have higher ones. */
  readonly sequence: number;
}

/** A length, a CRC-32 and a msgpack map. */
export const HEADER_BYTES = 512;
const NO_HEADER = new Uint8Array(HEADER_BYTES);

const headerSchema = z.object({
  namespace: z.string(),
  key: z.instanceof(Uint8Array),
  parent: z.instanceof(Uint8Array).nullable(),
  length: z.number(),
  checksum: z.number(),
  sequence: z.number(),
});

/** The name of a namespace's file: what peers must have in common, as a digest. */
export function blockFileName(namespace: Namespace): string {
  const { blockLengthBytes, fingerprint, hashSeed } = namespace;
  const all = JSON.stringify([blockLengthBytes, fingerprint, hashSeed]);
  return `${createHash("sha256").update(all).digest("hex").slice(0, 32)}.kvblocks`;
}

/**
 * Blocks on a disk. After a crash at any moment, each header stands beside the bytes that it was
 * written for.
 */
export class BlockFile {
  readonly #disk: Disk;
  readonly #name: string;
  readonly #lengthBytes: number;
  readonly #hasHeader: boolean[] = [];
  #syncing: Promise<void> = Promise.resolve();
  #nextSync: Promise<void> | undefined;

  constructor(disk: Disk, namespace: Namespace) {
    this.#disk = disk;
    this.#name = blockFileName(namespace);
    this.#lengthBytes = namespace.blockLengthBytes;
  }

  get places(): number {
    return this.#disk.places;
  }

  /** By place; undefined where there is no whole header of this namespace. */
  headers(): (BlockHeader | undefined)[] {
    return Array.from({ length: this.places }, (_, place) => {
      const bytes = Buffer.from(this.#disk.header(place));
      this.#hasHeader[place] = !bytes.equals(NO_HEADER);
      return this.#decode(bytes);
    });
  }

  /** Resolves when a crash cannot undo it. */
  async write(place: number, slot: number, header: BlockHeader): Promise<void> {
    const encoded = this.#encode(header);
    if (this.#hasHeader[place]) {
      await this.#disk.writeHeader(place, NO_HEADER);
      await this.#sync();
    }
    this.#hasHeader[place] = true;
    await this.#disk.write(place, slot);
    await this.#sync();
    await this.#disk.writeHeader(place, encoded);
    await this.#sync();
  }

  /** Fills slots of the memory. Checksums are the caller's. */
  read(places: readonly number[], slots: readonly number[]): Promise<void> {
    return this.#disk.read(places, slots);
  }

  close(): Promise<void> {
    return this.#disk.close();
  }

  /** One sync serves all that wait for it. */
  #sync(): Promise<void> {
    this.#nextSync ??= this.#syncing
      .catch(() => {})
      .then(() => {
        this.#nextSync = undefined;
        this.#syncing = this.#disk.sync();
        return this.#syncing;
      });
    return this.#nextSync;
  }

  #encode({ key, parent, checksum, sequence }: BlockHeader): Uint8Array {
    const namespace = this.#name;
    const length = this.#lengthBytes;
    const body = encodeMsgpack({
      namespace,
      key,
      parent: parent ?? null,
      length,
      checksum,
      sequence,
    });
    const bytes = Buffer.alloc(HEADER_BYTES);
    bytes.writeUInt32LE(body.length);
    bytes.writeUInt32LE(crc32(body), 4);
    bytes.set(body, 8);
    return bytes;
  }

  #decode(bytes: Buffer): BlockHeader | undefined {
    const length = bytes.readUInt32LE();
    const body = bytes.subarray(8, 8 + length);
    if (length === 0 || body.length !== length || crc32(body) !== bytes.readUInt32LE(4))
      return undefined;
    const { data } = headerSchema.safeParse(decodeMsgpack(body, "a block's header"));
    if (data?.namespace !== this.#name) return undefined;
    const { key, parent, checksum, sequence } = data;
    return { key, parent: parent ?? undefined, checksum, sequence };
  }
}
