/** A longer id has no room in 32 bits, or is larger than all vocabularies. */
const MOST_BEFORE_LAST_DIGIT = 99_999_999;

/**
 * A long list of token ids, read from the pieces of its JSON text without a JavaScript list of its
 * numbers.
 */
export class IdList {
  readonly #textBytes: number;
  #ids: Int32Array = new Int32Array(0);
  #count = 0;
  #readBytes = 0;

  /** `textBytes`: from the list's begin to the end of the text that it is in. */
  constructor(textBytes: number) {
    this.#textBytes = textBytes;
  }

  /** The ids that were read. */
  get ids(): Int32Array {
    return this.#ids.subarray(0, this.#count);
  }

  /**
   * Reads whole numbers of at most 9 digits, with commas between them. Returns false for anything
   * else; then the list is of no use any more.
   */
  add(bytes: Uint8Array, from: number, end: number): boolean {
    this.#makeRoom(end - from);
    const ids = this.#ids;
    let count = this.#count;
    /** The number that is being read; -1 for none. */
    let id = -1;
    let hasEnded = false;
    for (let at = from; at < end; at += 1) {
      const byte = bytes[at] as number;
      if (byte >= 0x30 && byte <= 0x39) {
        if (hasEnded || id === 0 || id > MOST_BEFORE_LAST_DIGIT) return false;
        id = (id === -1 ? 0 : 10 * id) + byte - 0x30;
      } else if (byte === 0x2c) {
        if (id === -1) return false;
        ids[count++] = id;
        id = -1;
        hasEnded = false;
      } else if (!isBlankByte(byte)) return false;
      else hasEnded = id !== -1;
    }
    if (id === -1) return false;
    ids[count++] = id;
    this.#count = count;
    this.#readBytes += end - from + 1;
    return true;
  }

  /**
   * Room for the next bytes. After the first ones, for all ids that come if the others are as long,
   * so that a list of millions is copied once.
   */
  #makeRoom(bytes: number): void {
    // The shortest id has two bytes with its comma.
    const most = this.#count + Math.ceil(bytes / 2) + 1;
    if (this.#ids.length >= most) return;
    const perByte = this.#count / Math.max(1, this.#readBytes);
    const likely = this.#count === 0 ? 0 : Math.ceil(perByte * this.#textBytes) + bytes;
    // V8 does not count shared memory. With what it counts it collects all garbage after every few
    // long bodies.
    const larger = new Int32Array(new SharedArrayBuffer(4 * Math.max(most, likely)));
    larger.set(this.ids);
    this.#ids = larger;
  }
}

/** Whether JSON allows the byte between its values. */
export function isBlankByte(byte: number | undefined): boolean {
  return byte === 0x20 || byte === 0x0a || byte === 0x0d || byte === 0x09;
}
