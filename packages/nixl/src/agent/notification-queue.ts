import { KvError, type Notification } from "@kv/interface";
import type { NativeAgent } from "../addon/native.js";
import type { RefCount } from "../ref-count.js";

const END: IteratorResult<Notification> = Object.freeze({ done: true, value: undefined });

/** An agent's notifications, which wait in the addon for their reader. */
export class NotificationQueue {
  readonly #native: Pick<NativeAgent, "takeNotifications">;
  readonly #keepAlive: RefCount;
  /** Taken from the addon, the oldest last. */
  #taken: Notification[] = [];
  /** Others wait in the addon. */
  #more = false;
  #waiting: ((result: IteratorResult<Notification>) => void)[] = [];
  #hasIterator = false;
  #closed = false;

  /** A waiting reader holds `keepAlive`, like a socket that is read. */
  constructor(native: Pick<NativeAgent, "takeNotifications">, keepAlive: RefCount) {
    this.#native = native;
    this.#keepAlive = keepAlive;
  }

  /** The first notification waits in the addon. */
  onArrival(): void {
    this.#more = true;
    this.#serve();
  }

  /** Throws `KV_NOTIFICATION_INVALID` while another iterator is open. */
  read(): AsyncIterableIterator<Notification> {
    if (this.#hasIterator) {
      throw new KvError(
        "KV_NOTIFICATION_INVALID",
        "another iterator is reading this agent's notifications",
        {
          hint: "end it first: break out of its loop, or call its return()",
        },
      );
    }
    this.#hasIterator = true;
    let ended = false;
    const iterator: AsyncIterableIterator<Notification> = {
      next: () => (ended ? Promise.resolve(END) : this.#read()),
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

  /** Drops the notifications that wait. */
  close(): void {
    this.#closed = true;
    this.#taken = [];
    this.#endReaders();
  }

  #read(): Promise<IteratorResult<Notification>> {
    const value = this.#taken.pop();
    if (value !== undefined) return Promise.resolve({ done: false, value });
    if (this.#closed) return Promise.resolve(END);
    // Peers decide how many come, so the event loop gets a turn between two parts.
    if (this.#more) setImmediate(() => this.#serve());
    return new Promise((resolve) => {
      this.#keepAlive.acquire();
      this.#waiting.push((result) => {
        this.#keepAlive.release();
        resolve(result);
      });
    });
  }

  #serve(): void {
    while (this.#more && this.#waiting.length > 0) {
      const [events, more] = this.#native.takeNotifications();
      this.#more = more;
      this.#taken = events
        .map(([, , , payload, from]) => ({ from: from ?? "", payload: payload as Uint8Array }))
        .reverse();
      for (const reader of this.#waiting.splice(0, events.length)) {
        const value = this.#taken.pop();
        if (value !== undefined) reader({ done: false, value });
      }
    }
  }

  #endReaders(): void {
    const readers = this.#waiting;
    this.#waiting = [];
    for (const reader of readers) reader(END);
  }
}
