import { KvError } from "@kv/interface";
import type { NativeAnswer } from "../addon/native.js";
import { fromNative } from "../addon/native-errors.js";
import type { RefCount } from "../ref-count.js";

interface PendingCall {
  resolve(value: never): void;
  reject(error: KvError): void;
}

/**
 * Calls into the addon for one agent. Each call has an id, which is never used again; the native
 * thread's answer names it. What a call creates in the addon (a list, a registration) is named by
 * the id of that call afterwards.
 */
export class AgentCalls {
  readonly #name: string;
  readonly #keepAlive: RefCount;
  /** The calls that the thread has not answered yet. */
  readonly #pending = new Map<number, PendingCall>();
  #lastId = 0;
  #closing: Promise<void> | undefined;

  /**
   * `name`: the agent's, for error messages. Each pending call counts as a user of `keepAlive`, so
   * that the process does not exit before the answer.
   */
  constructor(name: string, keepAlive: RefCount) {
    this.#name = name;
    this.#keepAlive = keepAlive;
  }

  /** Whether `close` was called. */
  get closing(): boolean {
    return this.#closing !== undefined;
  }

  /** An id that no call of this agent has had. */
  nextId(): number {
    this.#lastId += 1;
    return this.#lastId;
  }

  /**
   * Makes a call; `id` names what it created in the addon. Rejects with `KV_AGENT_CLOSED` once the
   * agent is closing.
   */
  async call(command: (callId: number) => unknown): Promise<{ id: number; value: unknown }> {
    this.requireOpen();
    let id = 0;
    const value = await this.make<unknown>((callId) => {
      id = callId;
      return command(callId);
    });
    return { id, value };
  }

  /**
   * Makes a call and returns its answer. Rejects with `KV_AGENT_CLOSED` once the agent is closing.
   */
  async answer<T>(command: (callId: number) => void): Promise<T> {
    return (await this.call(command)).value as T;
  }

  /**
   * Calls `command`, a method of the addon, with a fresh id, also once the agent is closing.
   * Settles with the answer that it returns or the thread gives; rejects with what it throws.
   */
  make<T>(command: (callId: number) => unknown): Promise<T> {
    const id = this.nextId();
    try {
      const answer = command(id) as NativeAnswer<T>;
      if (answer !== undefined) return Promise.resolve(answer[0]);
    } catch (error) {
      return Promise.reject(fromNative(error));
    }
    return this.answerTo<T>(id);
  }

  /** Settles with the thread's answer to the call `id`, which has been made already. */
  answerTo<T>(id: number): Promise<T> {
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

  /**
   * A `close` of something the agent made: closing twice is one call, a close that failed may be
   * tried again, and once the agent closes it waits for that, which releases everything.
   */
  closeOnce(command: (callId: number) => void): () => Promise<void> {
    let closed: Promise<void> | undefined;
    return () => {
      if (this.#closing !== undefined) return closed ?? this.#closing;
      closed ??= this.make<void>(command).catch((error: unknown) => {
        closed = undefined;
        throw error;
      });
      return closed;
    };
  }

  /** Closes the agent with `close`, once. No call but `make` is made from now on. */
  close(close: () => Promise<void>): Promise<void> {
    this.#closing ??= close();
    return this.#closing;
  }

  /** The agent has closed: rejects every pending call. */
  rejectAll(): void {
    for (const id of [...this.#pending.keys()]) this.settle(id, this.#closedError(), undefined);
  }

  /** Throws `KV_AGENT_CLOSED` once the agent is closing. */
  requireOpen(): void {
    if (this.#closing !== undefined) throw this.#closedError();
  }

  #closedError(): KvError {
    return new KvError("KV_AGENT_CLOSED", `the agent ${this.#name} is closed`);
  }
}
