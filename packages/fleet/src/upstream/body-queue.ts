interface Sender {
  pause(): void;
  resume(): void;
}

/** The first bytes of a body. */
export interface LimitedBody {
  readonly bytes: Buffer;
  readonly complete: boolean;
}

type Next = IteratorResult<Uint8Array, undefined>;

const DONE: Next = { done: true, value: undefined };

/**
 * Chunks of an instance's answer for one reader. More than `highBytes` of unread chunks pause the
 * sender.
 */
export class BodyQueue implements AsyncIterator<Uint8Array, undefined> {
  readonly #highBytes: number;
  readonly #chunks: Uint8Array[] = [];
  #unreadBytes = 0;
  #ended = false;
  #failure: Error | undefined;
  #paused: Sender | undefined;
  #reader: { resolve(next: Next): void; reject(error: Error): void } | undefined;

  constructor(highBytes = 256 * 1024) {
    this.#highBytes = highBytes;
  }

  /** Reads an ended body at once; undefined if it has not ended or exceeds `limitBytes`. */
  readBuffered(limitBytes: number): LimitedBody | undefined {
    if (!this.#ended || this.#unreadBytes > limitBytes) return undefined;
    this.#unreadBytes = 0;
    return { bytes: concatChunks(this.#chunks.splice(0)), complete: true };
  }

  /**
   * Reads until the end, above `limitBytes`, or until `enough` is true of a chunk. The rest stays
   * unread. Rejects with the error of `fail`.
   */
  async readLimited(
    limitBytes: number,
    enough?: (chunk: Uint8Array) => boolean,
  ): Promise<LimitedBody> {
    const chunks: Uint8Array[] = [];
    let lengthBytes = 0;
    for (;;) {
      const { done, value } = await this.next();
      if (done === true) return { bytes: concatChunks(chunks), complete: true };
      chunks.push(value);
      lengthBytes += value.byteLength;
      const isEnough = enough?.(value) === true;
      const isAbove = lengthBytes > limitBytes;
      const hasEnded = this.#ended && this.#chunks.length === 0;
      if (hasEnded || isEnough || isAbove)
        return { bytes: concatChunks(chunks), complete: hasEnded && !isAbove };
    }
  }

  /** All unread chunks as one. Rejects with the error of `fail` after the last. */
  next(): Promise<Next> {
    if (this.#chunks.length > 0) {
      const value = concatChunks(this.#chunks.splice(0));
      this.#unreadBytes = 0;
      const sender = this.#paused;
      this.#paused = undefined;
      sender?.resume();
      return Promise.resolve({ done: false, value });
    }
    if (this.#failure !== undefined) return Promise.reject(this.#failure);
    if (this.#ended) return Promise.resolve(DONE);
    return new Promise((resolve, reject) => {
      this.#reader = { resolve, reject };
    });
  }

  push(chunk: Uint8Array, sender: Sender): void {
    const reader = this.#reader;
    if (reader !== undefined) {
      this.#reader = undefined;
      reader.resolve({ done: false, value: chunk });
      return;
    }
    this.#chunks.push(chunk);
    this.#unreadBytes += chunk.byteLength;
    if (this.#unreadBytes > this.#highBytes && this.#paused === undefined) {
      this.#paused = sender;
      sender.pause();
    }
  }

  end(): void {
    this.#ended = true;
    this.#reader?.resolve(DONE);
    this.#reader = undefined;
  }

  fail(error: Error): void {
    this.#failure = error;
    this.#reader?.reject(error);
    this.#reader = undefined;
  }
}

/** A single chunk, as most answers are, is not copied. */
function concatChunks(chunks: readonly Uint8Array[]): Buffer {
  const [first] = chunks;
  return chunks.length === 1 && Buffer.isBuffer(first) ? first : Buffer.concat(chunks);
}
