import { KvError, type Notification } from "@kv/interface";
import type { RefCount } from "../ref-count.js";

const END: IteratorResult<Notification> = Object.freeze({ done: true, value: undefined });

/** Notifications between their arrival and their reader. One iterator reads at a time; notifications without a waiting reader are kept. */
export class NotificationQueue {
  readonly #keepAlive: RefCount;
  readonly #queued: Notification[] = [];
  #waiting: ((result: IteratorResult<Notification>) => void)[] = [];
  #hasIterator = false;
  #closed = false;

  /** A waiting reader counts as a user of `keepAlive`: like a socket that is read, it keeps the process alive. */
  constructor(keepAlive: RefCount) {
    this.#keepAlive = keepAlive;
  }

  /** Hands the notification to the reader that has waited longest, or keeps it. Dropped after `close`. */
  push(notification: Notification): void {
    if (this.#closed) return;
    const reader = this.#waiting.shift();
    if (reader === undefined) this.#queued.push(notification);
    else reader({ done: false, value: notification });
  }

  /** An iterator over the notifications, in order of arrival. Throws `KV_NOTIFICATION_INVALID` while another one is open. */
  read(): AsyncIterableIterator<Notification> {
    if (this.#hasIterator) {
      throw new KvError("KV_NOTIFICATION_INVALID", "another iterator is reading this agent's notifications", {
        hint: "end it first: break out of its loop, or call its return()",
      });
    }
    this.#hasIterator = true;
    let ended = false;
    const iterator: AsyncIterableIterator<Notification> = {
      next: () => (ended ? Promise.resolve(END) : this.#next()),
      return: () => {
        if (!ended) {
          ended = true;
          this.#hasIterator = false;
          this.#endReaders();
        }
        return Promise.resolve(END);
      },
      [Symbol.asyncIterator]: () => iterator,
    };
    return iterator;
  }

  /** Ends the iterator and drops the notifications that were kept. */
  close(): void {
    this.#closed = true;
    this.#queued.length = 0;
    this.#endReaders();
  }

  #next(): Promise<IteratorResult<Notification>> {
    const value = this.#queued.shift();
    if (value !== undefined) return Promise.resolve({ done: false, value });
    if (this.#closed) return Promise.resolve(END);
    return new Promise((resolve) => {
      this.#keepAlive.acquire();
      this.#waiting.push((result) => {
        this.#keepAlive.release();
        resolve(result);
      });
    });
  }

  #endReaders(): void {
    const readers = this.#waiting;
    this.#waiting = [];
    for (const reader of readers) reader(END);
  }
}
