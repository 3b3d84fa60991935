/** Stops and restarts a sender, as undici's dispatch controller does. */
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
 * The body of an instance's answer: chunks between the connection that receives them and the one
 * reader. More than `highBytes` of unread chunks pause the sender until they are read.
 */
export class BodyQueue implements AsyncIterator<Uint8Array, undefined> {
  readonly #highBytes: number;
  readonly #chunks: Uint8Array[] = [];
  #unreadBytes = 0;
  #ended = false;
  #failure: Error | undefined = undefined;
  #paused: Sender | undefined = undefined;
  #resolve: ((next: Next) => void) | undefined = undefined;
  #reject: ((error: Error) => void) | undefined = undefined;

  constructor(highBytes = 256 * 1024) {
    this.#highBytes = highBytes;
  }

  /**
   * Reads all of a body that has ended already, without a wait; undefined where it has not ended,
   * or has more than `limitBytes`.
   */
  readBuffered(limitBytes: number): LimitedBody | undefined {
    if (!this.#ended || this.#unreadBytes > limitBytes) return undefined;
    this.#unreadBytes = 0;
    return { bytes: concatChunks(this.#chunks.splice(0)), complete: true };
  }

  /**
   * Reads until the end, until there are more than `limitBytes`, or until `enough` is true of a
   * chunk; it is asked of each, in order. The rest stays unread. Rejects with the error of `fail`.
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
      if (this.#finished()) return { bytes: concatChunks(chunks), complete: !isAbove };
      if (isEnough || isAbove) return { bytes: concatChunks(chunks), complete: false };
    }
  }

  /**
   * The chunks that have come since the last call, as one. Rejects with the error of `fail` when
   * all chunks before it are read.
   */
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
      this.#resolve = resolve;
      this.#reject = reject;
    });
  }

  push(chunk: Uint8Array, sender: Sender): void {
    const resolve = this.#resolve;
    if (resolve !== undefined) {
      this.#resolve = undefined;
      resolve({ done: false, value: chunk });
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
    this.#resolve?.(DONE);
    this.#resolve = undefined;
  }

  fail(error: Error): void {
    this.#failure = error;
    if (this.#resolve !== undefined) this.#reject?.(error);
    this.#resolve = undefined;
  }

  /**
   * Whether the body has ended and all of it is read, which is known without a wait for the end.
   */
  #finished(): boolean {
    return this.#ended && this.#chunks.length === 0;
  }
}

/** One buffer of several chunks; a single chunk, as most answers are, is not copied. */
function concatChunks(chunks: readonly Uint8Array[]): Buffer {
  const [first] = chunks;
  return chunks.length === 1 && Buffer.isBuffer(first) ? first : Buffer.concat(chunks);
}
