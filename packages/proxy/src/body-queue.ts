/** Bytes as they arrive; reading them is what lets more come. */
export interface UnreadBody extends AsyncIterator<Uint8Array, undefined> {
  next(): Promise<IteratorResult<Uint8Array, undefined>>;
  /** True when the end has come and nothing is left to read: known without a further wait. */
  finished?(): boolean;
}

interface Valve {
  pause(): void;
  resume(): void;
}

/** Chunks between the one who receives them and the one who reads them; more than `highBytes` unread stops the sender. */
export interface BodyQueue {
  readonly body: UnreadBody;
  push(chunk: Uint8Array, valve: Valve): void;
  end(): void;
  fail(error: Error): void;
}

export function createBodyQueue(highBytes = 256 * 1024): BodyQueue {
  const chunks: Uint8Array[] = [];
  let heldBytes = 0;
  let ended = false;
  let failure: Error | undefined;
  let paused: Valve | undefined;
  let waiting:
    | { resolve(result: IteratorResult<Uint8Array, undefined>): void; reject(error: Error): void }
    | undefined;
  const done = { done: true, value: undefined } as const;
  return {
    body: {
      finished: () => ended && chunks.length === 0,
      next() {
        const value = chunks.shift();
        if (value !== undefined) {
          heldBytes -= value.byteLength;
          if (paused !== undefined && heldBytes <= highBytes / 2) {
            const valve = paused;
            paused = undefined;
            valve.resume();
          }
          return Promise.resolve({ done: false, value });
        }
        if (failure !== undefined) return Promise.reject(failure);
        if (ended) return Promise.resolve(done);
        return new Promise((resolve, reject) => {
          waiting = { resolve, reject };
        });
      },
    },
    push(chunk, valve) {
      if (waiting !== undefined) {
        const { resolve } = waiting;
        waiting = undefined;
        resolve({ done: false, value: chunk });
        return;
      }
      chunks.push(chunk);
      heldBytes += chunk.byteLength;
      if (heldBytes > highBytes && paused === undefined) {
        paused = valve;
        valve.pause();
      }
    },
    end() {
      ended = true;
      waiting?.resolve(done);
      waiting = undefined;
    },
    fail(error) {
      failure = error;
      waiting?.reject(error);
      waiting = undefined;
    },
  };
}
