import type { KvError } from "@kv/interface";
import { callNative } from "../addon/native-errors.js";

interface Pending {
  resolve(value: never): void;
  reject(error: KvError): void;
}

/**
 * Promises that the agent's thread settles. While there are any the process stays alive; an agent with nothing under way does
 * not hold it.
 */
export interface Tickets {
  /** A ticket never used before. */
  next(): number;
  /** Calls `command` with a fresh ticket; the promise settles when the thread has answered. */
  call<T>(command: (ticket: number) => void): Promise<T>;
  settle(ticket: number, error: KvError | undefined, value: unknown): void;
  /** Something other than a call is awaited; the answered function says that it is over. */
  hold(): () => void;
  /** Rejects whatever is left. */
  abandon(error: KvError): void;
}

export function tickets(keepAlive: (alive: boolean) => void): Tickets {
  const pending = new Map<number, Pending>();
  let last = 0;
  let held = 0;

  const hold = () => {
    if (++held === 1) keepAlive(true);
    let over = false;
    return () => {
      if (over) return;
      over = true;
      if (--held === 0) keepAlive(false);
    };
  };

  return {
    next: () => ++last,
    hold,
    call<T>(command: (ticket: number) => void): Promise<T> {
      const ticket = ++last;
      return new Promise<T>((resolve, reject) => {
        callNative(() => command(ticket));
        const over = hold();
        pending.set(ticket, {
          resolve(value) {
            over();
            resolve(value);
          },
          reject(error) {
            over();
            reject(error);
          },
        });
      });
    },
    settle(ticket, error, value) {
      const found = pending.get(ticket);
      if (found === undefined) return;
      pending.delete(ticket);
      if (error === undefined) found.resolve(value as never);
      else found.reject(error);
    },
    abandon(error) {
      const left = [...pending.values()];
      pending.clear();
      for (const entry of left) entry.reject(error);
    },
  };
}
