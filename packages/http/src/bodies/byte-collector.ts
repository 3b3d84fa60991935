const FIRST_BYTES = 64 * 1024;
const NOTHING = Buffer.alloc(0);

/**
 * The bytes of a body that arrives in chunks. Many small chunks take no more memory than a large
 * one, and the end copies nothing.
 */
export class ByteCollector {
  #bytes: Buffer = NOTHING;
  #length = 0;
  readonly #expectedLength: number;

  /**
   * `expectedLength`: as their sender has said. It saves copies, and no memory is taken for bytes
   * that do not come.
   */
  constructor(expectedLength = 0) {
    this.#expectedLength = expectedLength;
  }

  /** Adds a chunk. */
  push(chunk: Buffer): void {
    const length = this.#length + chunk.length;
    // The first one is not copied: most bodies are one chunk.
    if (this.#length === 0) this.#bytes = chunk;
    else {
      if (length > this.#bytes.length) this.#grow(length);
      chunk.copy(this.#bytes, this.#length);
    }
    this.#length = length;
  }

  /** How many bytes there are. */
  get length(): number {
    return this.#length;
  }

  /** The first bytes, at most `mostBytes`. They stay. */
  begin(mostBytes: number): Buffer {
    return this.#bytes.subarray(0, Math.min(this.#length, mostBytes));
  }

  /** Returns the bytes once, and forgets them. */
  take(): Buffer {
    const bytes = this.#bytes.subarray(0, this.#length);
    this.#bytes = NOTHING;
    this.#length = 0;
    return bytes;
  }

  #grow(length: number): void {
    const isExpected = length <= this.#expectedLength;
    const wanted = isExpected ? Math.min(this.#expectedLength, 4 * length) : 2 * length;
    const grown = Buffer.allocUnsafeSlow(Math.max(FIRST_BYTES, wanted));
    this.#bytes.copy(grown, 0, 0, this.#length);
    this.#bytes = grown;
  }
}

/** The bytes, not copied. */
export function asBuffer(bytes: Uint8Array): Buffer {
  return Buffer.isBuffer(bytes)
    ? bytes
    : Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength);
}
