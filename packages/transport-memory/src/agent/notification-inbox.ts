import { KvError, type Notification } from "@kv/interface";

type Waiting = ((result: IteratorResult<Notification>) => void)[];

export class NotificationInbox {
  readonly #owner: string;
  readonly #unread: Notification[] = [];
  #waiting: Waiting | undefined;
  #closed = false;

  constructor(owner: string) {
    this.#owner = owner;
  }

  push(notification: Notification): void {
    if (this.#closed) return;
    const resolve = this.#waiting?.shift();
    if (resolve === undefined) this.#unread.push(notification);
    else resolve({ done: false, value: notification });
  }

  /** @throws `KV_NOTIFICATION_INVALID` while another iterator is open. */
  iterate(): AsyncIterableIterator<Notification> {
    if (this.#waiting !== undefined) {
      throw new KvError(
        "KV_NOTIFICATION_INVALID",
        `another iterator reads the notifications of agent ${this.#owner}`,
        { hint: "end the other iterator first: break out of its loop, or call its return()" },
      );
    }
    const own: Waiting = [];
    this.#waiting = own;
    const next = (): Promise<IteratorResult<Notification>> => {
      if (this.#closed || this.#waiting !== own)
        return Promise.resolve({ done: true, value: undefined });
      const value = this.#unread.shift();
      if (value !== undefined) return Promise.resolve({ done: false, value });
      return new Promise((resolve) => void own.push(resolve));
    };
    return {
      next,
      return: () => {
        if (this.#waiting === own) this.#endIterator();
        return Promise.resolve({ done: true, value: undefined });
      },
      [Symbol.asyncIterator]() {
        return this;
      },
    };
  }

  close(): void {
    this.#closed = true;
    this.#unread.length = 0;
    this.#endIterator();
  }

  #endIterator(): void {
    const waiting = this.#waiting ?? [];
    this.#waiting = undefined;
    for (const resolve of waiting) resolve({ done: true, value: undefined });
  }
}
