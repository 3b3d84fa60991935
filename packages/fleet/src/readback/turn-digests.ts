import { hash } from "node:crypto";

/** Token ids per chunk. */
const CHUNK = 256;

/**
 * Digests of a conversation's whole chunks and prefixes. Equal digests mean equal scope and ids.
 */
export class TurnDigests {
  readonly #ids: Int32Array;
  readonly #chunks: string[];

  /** `scope`: what must be equal besides the ids, such as the model and the `cache_salt`. */
  constructor(scope: readonly unknown[], ids: ArrayLike<number>) {
    this.#ids = ids instanceof Int32Array ? ids : Int32Array.from(ids);
    this.#chunks = [digestOf("scope", Buffer.from(JSON.stringify(scope)))];
    for (let end = CHUNK; end <= this.#ids.length; end += CHUNK)
      this.#chunks.push(digestOf(`chunk ${this.#chunks.at(-1)}`, this.#bytes(end - CHUNK, end)));
  }

  get length(): number {
    return this.#ids.length;
  }

  /** Of the scope alone, the first chunk, the first two, and so on. */
  get chunks(): readonly string[] {
    return this.#chunks;
  }

  chunkOf(length: number): string {
    return this.#chunks[Math.floor(length / CHUNK)] ?? "";
  }

  of(length: number): string {
    const whole = Math.floor(length / CHUNK);
    return digestOf(`begin ${this.#chunks[whole]}`, this.#bytes(whole * CHUNK, length));
  }

  #bytes(from: number, to: number): Buffer {
    const { buffer, byteOffset } = this.#ids;
    return Buffer.from(buffer, byteOffset + 4 * from, 4 * (to - from));
  }
}

function digestOf(before: string, bytes: Buffer): string {
  return hash("sha256", Buffer.concat([Buffer.from(`${before}\n`), bytes]), "base64url");
}
