import { open } from "node:fs/promises";

const HEADER_BYTES = 64;
/** "\x7fELF", 64 bits, little endian: x64 and arm64. */
const MAGIC = Uint8Array.of(0x7f, 0x45, 0x4c, 0x46, 2, 1);
const ENTRY_BYTES = 56;
const LOADED = 1;

export interface Shortage {
  /** Bytes that the file must have for what is loaded of it. */
  readonly wanted: number;
  readonly found: number;
}

/**
 * What a shared library lacks at its end, by its own table of what is loaded. The loader maps such a file, and the process dies of SIGBUS when
 * it touches what is not there. Undefined for a file that is whole, and for one that the loader refuses by itself. Rejects when it cannot be read.
 */
export async function shortageOf(path: string): Promise<Shortage | undefined> {
  const file = await open(path);
  try {
    const found = (await file.stat()).size;
    const header = await read(HEADER_BYTES, 0);
    if (header === undefined || !MAGIC.every((byte, index) => header[index] === byte)) return undefined;
    const [at, size, count] = [header.readBigUInt64LE(32), header.readUInt16LE(54), header.readUInt16LE(56)];
    if (size !== ENTRY_BYTES || at > found) return undefined;
    const table = await read(ENTRY_BYTES * count, Number(at));
    if (table === undefined) return undefined;
    let wanted = 0;
    for (let entry = 0; entry < table.length; entry += ENTRY_BYTES) {
      if (table.readUInt32LE(entry) !== LOADED) continue;
      const end = table.readBigUInt64LE(entry + 8) + table.readBigUInt64LE(entry + 32);
      wanted = Math.max(wanted, Number(end));
    }
    return wanted > found ? { wanted, found } : undefined;
  } finally {
    await file.close();
  }

  /** Undefined where the file ends before. */
  async function read(lengthBytes: number, position: number): Promise<Buffer | undefined> {
    const buffer = Buffer.alloc(lengthBytes);
    const { bytesRead } = await file.read(buffer, 0, lengthBytes, position);
    return bytesRead === lengthBytes ? buffer : undefined;
  }
}
