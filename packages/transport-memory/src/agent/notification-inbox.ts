import { KvError, type Notification } from "@kv/interface";

/** Notifications that have arrived, and the one iterator that takes them. */
export interface Inbox {
  push(notification: Notification): void;
  iterate(): AsyncIterableIterator<Notification>;
  /** Ends the iterator. */
  close(): void;
}

export function inbox(owner: string): Inbox {
  const kept: Notification[] = [];
  let reader: Reader | undefined;
  let closed = false;

  interface Reader {
    /** Calls of `next` that wait. */
    readonly waiting: ((result: IteratorResult<Notification>) => void)[];
  }

  function end(): void {
    const ended = reader;
    reader = undefined;
    for (const resolve of ended?.waiting ?? []) resolve({ done: true, value: undefined });
  }

  return {
    push(notification) {
      if (closed) return;
      const resolve = reader?.waiting.shift();
      if (resolve === undefined) kept.push(notification);
      else resolve({ done: false, value: notification });
    },
    iterate() {
      if (reader !== undefined) {
        throw new KvError(
          "KV_NOTIFICATION_INVALID",
          `notifications of agent ${owner} are being read already`,
          {
            hint: "end the other iterator first: break out of its loop, or call its return()",
          },
        );
      }
      const own: Reader = { waiting: [] };
      reader = own;
      return {
        next() {
          if (closed || reader !== own) return Promise.resolve({ done: true, value: undefined });
          const value = kept.shift();
          if (value !== undefined) return Promise.resolve({ done: false, value });
          return new Promise((resolve) => void own.waiting.push(resolve));
        },
        return() {
          if (reader === own) end();
          return Promise.resolve({ done: true, value: undefined });
        },
        [Symbol.asyncIterator]() {
          return this;
        },
      };
    },
    close() {
      closed = true;
      kept.length = 0;
      end();
    },
  };
}
