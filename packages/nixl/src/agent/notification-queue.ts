import { KvError, type Notification } from "@kv/interface";

/** Notifications between their arrival and their reader: one iterator at a time, those that find none are kept. */
export interface Inbox {
  push(notification: Notification): void;
  read(): AsyncIterableIterator<Notification>;
  /** Ends the iterator, and drops what was kept. */
  close(): void;
}

/** `hold` says that a reader waits, which keeps the process alive as a socket would; what it answers says that it got its due. */
export function inbox(hold: () => () => void): Inbox {
  const kept: Notification[] = [];
  let reading = false;
  let closed = false;
  let waiting: ((result: IteratorResult<Notification>) => void)[] = [];

  const end = (): IteratorResult<Notification> => ({ done: true, value: undefined });

  return {
    push(notification) {
      if (closed) return;
      const reader = waiting.shift();
      if (reader === undefined) kept.push(notification);
      else reader({ done: false, value: notification });
    },
    read() {
      if (reading)
        throw new KvError(
          "KV_NOTIFICATION_INVALID",
          "another iterator is reading this agent's notifications",
          {
            hint: "end it first: break out of its loop, or call its return()",
          },
        );
      reading = true;
      let over = false;
      const iterator: AsyncIterableIterator<Notification> = {
        next() {
          if (over) return Promise.resolve(end());
          const value = kept.shift();
          if (value !== undefined) return Promise.resolve({ done: false, value });
          if (closed) return Promise.resolve(end());
          return new Promise((resolve) => {
            const over = hold();
            waiting.push((result) => {
              over();
              resolve(result);
            });
          });
        },
        return() {
          if (!over) {
            over = true;
            reading = false;
            const readers = waiting;
            waiting = [];
            for (const reader of readers) reader(end());
          }
          return Promise.resolve(end());
        },
        [Symbol.asyncIterator]: () => iterator,
      };
      return iterator;
    },
    close() {
      closed = true;
      kept.length = 0;
      const readers = waiting;
      waiting = [];
      for (const reader of readers) reader(end());
    },
  };
}
