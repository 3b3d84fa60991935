import { KvError, type Notification } from "@kv/interface";
import type { RefCount } from "../ref-count.js";

const END: IteratorResult<Notification> = Object.freeze({ done: true, value: undefined });

export const MAX_WAITING = 65_536;
export const MAX_WAITING_BYTES = 64 * 2 ** 20;
/**
 * One sender gets a quarter of both limits, so that it does not crowd out the others. A sender
 * states its own name, so it may use many.
 */
const SENDER_PARTS = 4;

export interface NotificationQueueOptions {
  /** A waiting reader keeps the process alive, like a socket that is read. */
  readonly keepAlive: RefCount;
  onDrop(from: string): void;
}

interface Waiting {
  count: number;
  bytes: number;
}

/** Notifications between their arrival and their reader. Beyond its limits it drops new ones. */
export class NotificationQueue {
  readonly #options: NotificationQueueOptions;
  readonly #all: Waiting = { count: 0, bytes: 0 };
  readonly #bySender = new Map<string, Waiting>();
  #arrived: Notification[] = [];
  /**
   * The notifications before `#arrived`, the oldest last: shifting a long array takes time in its
   * length.
   */
  #next: Notification[] = [];
  #waiting: ((result: IteratorResult<Notification>) => void)[] = [];
  #hasIterator = false;
  #closed = false;

  constructor(options: NotificationQueueOptions) {
    this.#options = options;
  }

  push(notification: Notification): void {
    if (this.#closed) return;
    const reader = this.#waiting.shift();
    if (reader !== undefined) reader({ done: false, value: notification });
    else if (this.#admits(notification)) this.#arrived.push(notification);
    else this.#options.onDrop(notification.from);
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
    this.#arrived = [];
    this.#next = [];
    this.#bySender.clear();
    this.#endReaders();
  }

  #read(): Promise<IteratorResult<Notification>> {
    const value = this.#shift();
    if (value !== undefined) return Promise.resolve({ done: false, value });
    if (this.#closed) return Promise.resolve(END);
    return new Promise((resolve) => {
      const { keepAlive } = this.#options;
      keepAlive.acquire();
      this.#waiting.push((result) => {
        keepAlive.release();
        resolve(result);
      });
    });
  }

  #admits({ from, payload }: Notification): boolean {
    const own = this.#bySender.get(from) ?? { count: 0, bytes: 0 };
    const fits = ({ count, bytes }: Waiting, parts: number) =>
      count < MAX_WAITING / parts && bytes + payload.length <= MAX_WAITING_BYTES / parts;
    if (!fits(this.#all, 1) || (own.count > 0 && !fits(own, SENDER_PARTS))) return false;
    this.#bySender.set(from, own);
    for (const waiting of [this.#all, own]) {
      waiting.count += 1;
      waiting.bytes += payload.length;
    }
    return true;
  }

  #shift(): Notification | undefined {
    if (this.#next.length === 0) {
      this.#next = this.#arrived.reverse();
      this.#arrived = [];
    }
    const notification = this.#next.pop();
    const own = notification && this.#bySender.get(notification.from);
    if (notification === undefined || own === undefined) return undefined;
    for (const waiting of [this.#all, own]) {
      waiting.count -= 1;
      waiting.bytes -= notification.payload.length;
    }
    if (own.count === 0) this.#bySender.delete(notification.from);
    return notification;
  }

  #endReaders(): void {
    const readers = this.#waiting;
    this.#waiting = [];
    for (const reader of readers) reader(END);
  }
}
