import { KvError } from "@kv/interface";
import type { NativeAnswer } from "../addon/native.js";
import { fromNative } from "../addon/native-errors.js";
import type { RefCount } from "../ref-count.js";

interface PendingCall {
  resolve(value: never): void;
  reject(error: KvError): void;
}

/**
 * Calls into the addon for one agent. The id of a call is never used again: it names the thread's
 * answer and what the call created.
 */
export class AgentCalls {
  readonly #name: string;
  readonly #keepAlive: RefCount;
  readonly #pending = new Map<number, PendingCall>();
  #lastId = 0;
  #closing: Promise<void> | undefined;

  /**
   * `name` is for error messages. A pending call holds `keepAlive`, so that the process does not
   * exit before the answer.
   */
  constructor(name: string, keepAlive: RefCount) {
    this.#name = name;
    this.#keepAlive = keepAlive;
  }

  get closing(): boolean {
    return this.#closing !== undefined;
  }

  nextId(): number {
    this.#lastId += 1;
    return this.#lastId;
  }

  /** `id` names what the call created. Rejects with `KV_AGENT_CLOSED` once the agent is closing. */
  async call(command: (callId: number) => unknown): Promise<{ id: number; value: unknown }> {
    this.requireOpen();
    let id = 0;
    const value = await this.make<unknown>((callId) => {
      id = callId;
      return command(callId);
    });
    return { id, value };
  }

  /** Rejects with `KV_AGENT_CLOSED` once the agent is closing. */
  async answer<T>(command: (callId: number) => void): Promise<T> {
    return (await this.call(command)).value as T;
  }

  /**
   * Calls the addon with a fresh id, also once the agent is closing. Settles with the answer that
   * the method returns or the thread gives.
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

  /** Waits for the answer to the call `id`, which was made already. */
  answerTo<T>(id: number): Promise<T> {
    this.#keepAlive.acquire();
    return new Promise<T>((resolve, reject) => {
      this.#pending.set(id, { resolve, reject });
    });
  }

  /** Ignores ids that are not pending. */
  settle(id: number, error: KvError | undefined, value: unknown): void {
    const call = this.#pending.get(id);
    if (call === undefined) return;
    this.#pending.delete(id);
    this.#keepAlive.release();
    if (error === undefined) call.resolve(value as never);
    else call.reject(error);
  }

  /**
   * Makes a `close` that runs once, and again only after a failure. Once the agent is closing it
   * waits for that, which releases everything.
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

  /** Runs `close` once. From now on only `make` still makes calls. */
  close(close: () => Promise<void>): Promise<void> {
    this.#closing ??= close();
    return this.#closing;
  }

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
