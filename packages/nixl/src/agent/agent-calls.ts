import { KvError } from "@kv/interface";
import type { PendingCalls } from "./pending-calls.js";

/** Calls into the addon for one agent, which fail once the agent closes. */
export class AgentCalls {
  readonly #name: string;
  readonly #calls: PendingCalls;
  #closing: Promise<void> | undefined;

  /** `name`: the agent's, for error messages. */
  constructor(name: string, calls: PendingCalls) {
    this.#name = name;
    this.#calls = calls;
  }

  /** Whether `close` was called. */
  get closing(): boolean {
    return this.#closing !== undefined;
  }

  /** Makes a call; `id` names what it created in the addon. Rejects with `KV_AGENT_CLOSED` once the agent is closing. */
  async call(command: (callId: number) => unknown): Promise<{ id: number; value: unknown }> {
    this.requireOpen();
    let id = 0;
    const value = await this.#calls.call<unknown>((callId) => {
      id = callId;
      return command(callId);
    });
    return { id, value };
  }

  /** Makes a call and returns its answer. Rejects with `KV_AGENT_CLOSED` once the agent is closing. */
  async answer<T>(command: (callId: number) => void): Promise<T> {
    return (await this.call(command)).value as T;
  }

  /**
   * A `close` of something the agent made: closing twice is one call, a close that failed may be tried again, and once the agent closes it waits for
   * that, which releases everything.
   */
  closeOnce(command: (callId: number) => void): () => Promise<void> {
    let closed: Promise<void> | undefined;
    return () => {
      if (this.#closing !== undefined) return closed ?? this.#closing;
      closed ??= this.#calls.call<void>(command).catch((error: unknown) => {
        closed = undefined;
        throw error;
      });
      return closed;
    };
  }

  /** Closes the agent with `close`, once. No call is made from now on. */
  close(close: () => Promise<void>): Promise<void> {
    this.#closing ??= close();
    return this.#closing;
  }

  /** Throws `KV_AGENT_CLOSED` once the agent is closing. */
  requireOpen(): void {
    if (this.#closing === undefined) return;
    throw new KvError("KV_AGENT_CLOSED", `the agent ${this.#name} is closed`);
  }
}
