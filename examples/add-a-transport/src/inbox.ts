import { KvError, type Notification } from "@kv/interface";

export interface Inbox {
  deliver(notification: Notification): void;
  notifications(): AsyncIterableIterator<Notification>;
  close(): void;
  readonly received: number;
}

export function createInbox(): Inbox {
  const kept: Notification[] = [];
  let waiting: ((result: IteratorResult<Notification>) => void) | undefined;
  let reading = false;
  let closed = false;
  let received = 0;
  const over: IteratorResult<Notification> = { done: true, value: undefined };
  return {
    get received() {
      return received;
    },
    deliver(notification) {
      received++;
      const resolve = waiting;
      waiting = undefined;
      if (resolve === undefined) kept.push(notification);
      else resolve({ done: false, value: notification });
    },
    notifications() {
      if (reading)
        throw new KvError(
          "KV_NOTIFICATION_INVALID",
          "another iterator reads this agent's notifications",
        );
      reading = true;
      let mine = true;
      const iterator: AsyncIterableIterator<Notification> = {
        async next() {
          const value = mine ? kept.shift() : undefined;
          if (value !== undefined) return { done: false, value };
          if (!mine || closed) return over;
          return new Promise((resolve) => {
            waiting = resolve;
          });
        },
        async return() {
          if (mine) {
            reading = false;
            waiting?.(over);
            waiting = undefined;
          }
          mine = false;
          return over;
        },
        [Symbol.asyncIterator]: () => iterator,
      };
      return iterator;
    },
    close() {
      closed = true;
      waiting?.(over);
      waiting = undefined;
    },
  };
}
