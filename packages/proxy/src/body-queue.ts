/** Bytes as they arrive, in pieces of any size; reading them is what lets more come. */
export interface UnreadBody extends AsyncIterator<Uint8Array, undefined> {
  next(): Promise<IteratorResult<Uint8Array, undefined>>;
  /** True when the end has come and nothing is left to read: known without a further wait. */
  finished?(): boolean;
  /** All of it, where the end has come and it is no longer than the limit; it is read then. Without a wait. */
  whole?(limitBytes: number): Buffer | undefined;
}

interface Valve {
  pause(): void;
  resume(): void;
}

/** Chunks between the one who receives them and the one who reads them; more than `highBytes` unread stops the sender. */
export interface BodyQueue extends UnreadBody {
  push(chunk: Uint8Array, valve: Valve): void;
  end(): void;
  fail(error: Error): void;
}

export function createBodyQueue(highBytes = 256 * 1024): BodyQueue {
  return new ChunkQueue(highBytes);
}

type Next = IteratorResult<Uint8Array, undefined>;

const DONE: Next = { done: true, value: undefined };

/** A class, as every leg of every request has one. */
class ChunkQueue implements BodyQueue {
  readonly #highBytes: number;
  readonly #chunks: Uint8Array[] = [];
  #heldBytes = 0;
  #ended = false;
  #failure: Error | undefined = undefined;
  #paused: Valve | undefined = undefined;
  #resolve: ((next: Next) => void) | undefined = undefined;
  #reject: ((error: Error) => void) | undefined = undefined;

  constructor(highBytes: number) {
    this.#highBytes = highBytes;
  }

  finished(): boolean {
    return this.#ended && this.#chunks.length === 0;
  }

  whole(limitBytes: number): Buffer | undefined {
    if (!this.#ended || this.#heldBytes > limitBytes) return undefined;
    this.#heldBytes = 0;
    return joined(this.#chunks.splice(0));
  }

  next(): Promise<Next> {
    if (this.#chunks.length > 0) {
      // Small pieces that came together go on together.
      const value = joined(this.#chunks.splice(0));
      this.#heldBytes = 0;
      const valve = this.#paused;
      this.#paused = undefined;
      valve?.resume();
      return Promise.resolve({ done: false, value });
    }
    if (this.#failure !== undefined) return Promise.reject(this.#failure);
    if (this.#ended) return Promise.resolve(DONE);
    return new Promise((resolve, reject) => {
      this.#resolve = resolve;
      this.#reject = reject;
    });
  }

  push(chunk: Uint8Array, valve: Valve): void {
    const resolve = this.#resolve;
    if (resolve !== undefined) {
      this.#resolve = undefined;
      resolve({ done: false, value: chunk });
      return;
    }
    this.#chunks.push(chunk);
    this.#heldBytes += chunk.byteLength;
    if (this.#heldBytes > this.#highBytes && this.#paused === undefined) {
      this.#paused = valve;
      valve.pause();
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
}

/** Most answers come in one piece, which needs no copy. */
export function joined(chunks: readonly Uint8Array[]): Buffer {
  const [first] = chunks;
  return chunks.length === 1 && Buffer.isBuffer(first) ? first : Buffer.concat(chunks);
}
