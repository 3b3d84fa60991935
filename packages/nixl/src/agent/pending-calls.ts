import type { KvError } from "@kv/interface";
import type { NativeAnswer } from "../addon/native.js";
import { fromNative } from "../addon/native-errors.js";
import type { RefCount } from "../ref-count.js";

interface PendingCall {
  resolve(value: never): void;
  reject(error: KvError): void;
}

/**
 * Calls of an agent that its native thread has not answered yet. Each call has an id, which is never used again; the thread's answer names
 * it. What a call creates in the addon (a list, a registration) is named by the id of that call afterwards.
 */
export class PendingCalls {
  readonly #pending = new Map<number, PendingCall>();
  readonly #keepAlive: RefCount;
  #lastId = 0;

  /** Each pending call counts as a user of `keepAlive`, so that the process does not exit before the answer. */
  constructor(keepAlive: RefCount) {
    this.#keepAlive = keepAlive;
  }

  /** An id that no call of this agent has had. */
  nextId(): number {
    this.#lastId += 1;
    return this.#lastId;
  }

  /** Calls `command`, a method of the addon, with a fresh id. Settles with the answer that it returns or the thread gives; rejects with what it throws. */
  call<T>(command: (id: number) => unknown): Promise<T> {
    const id = this.nextId();
    try {
      const answer = command(id) as NativeAnswer<T>;
      if (answer !== undefined) return Promise.resolve(answer[0]);
    } catch (error) {
      return Promise.reject(fromNative(error));
    }
    return this.answer<T>(id);
  }

  /** Settles with the thread's answer to the call `id`, which has been made already. */
  answer<T>(id: number): Promise<T> {
    this.#keepAlive.acquire();
    return new Promise<T>((resolve, reject) => {
      this.#pending.set(id, { resolve, reject });
    });
  }

  /** Settles the call `id` with the thread's answer. Ignores ids that are not pending. */
  settle(id: number, error: KvError | undefined, value: unknown): void {
    const call = this.#pending.get(id);
    if (call === undefined) return;
    this.#pending.delete(id);
    this.#keepAlive.release();
    if (error === undefined) call.resolve(value as never);
    else call.reject(error);
  }

  /** Rejects every pending call. */
  rejectAll(error: KvError): void {
    for (const id of [...this.#pending.keys()]) this.settle(id, error, undefined);
  }
}
