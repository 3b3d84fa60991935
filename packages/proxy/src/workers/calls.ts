import { KvError, type KvErrorCode } from "@kv/interface";

/** What the other process may call. Arguments and results are plain data. */
export type Operations = Readonly<Record<string, (argument: never) => unknown>>;

/** The answer to a call has its `id`, and a call that wants none has no `id`. */
interface Message {
  readonly id?: number | undefined;
  readonly call?: string;
  readonly argument?: unknown;
  readonly result?: unknown;
  readonly error?: ReturnType<KvError["toJSON"]>;
}

interface Pending {
  resolve(result: never): void;
  reject(error: KvError): void;
}

/**
 * Calls between a worker and its primary over `node:cluster`. Messages of one direction stay in
 * order.
 */
export class Calls {
  readonly #pending = new Map<number | undefined, Pending>();
  #nextId = 1;
  #closed: KvError | undefined;

  constructor(
    private readonly send: (message: object) => void,
    private readonly operations: Operations,
  ) {}

  /** @throws The operation's errors; `KV_REQUEST_ABORTED` when the other process ends. */
  call<T>(name: string, argument?: unknown): Promise<T> {
    if (this.#closed !== undefined) return Promise.reject(this.#closed);
    const id = this.#nextId++;
    return new Promise<T>((resolve, reject) => {
      this.#pending.set(id, { resolve, reject });
      this.send({ call: name, argument, id });
    });
  }

  tell(name: string, argument: unknown): void {
    if (this.#closed === undefined) this.send({ call: name, argument });
  }

  receive(message: unknown): void {
    const { call, argument, id, result, error } = message as Message;
    if (call !== undefined) {
      void this.#serve(call, argument, id);
      return;
    }
    const pending = this.#pending.get(id);
    this.#pending.delete(id);
    if (error === undefined) pending?.resolve(result as never);
    else pending?.reject(errorOf(error));
  }

  close(error: KvError): void {
    this.#closed = error;
    for (const { reject } of this.#pending.values()) reject(error);
    this.#pending.clear();
  }

  async #serve(call: string, argument: unknown, id: number | undefined): Promise<void> {
    let answer: Message;
    try {
      answer = { id, result: await this.operations[call]?.(argument as never) };
    } catch (thrown) {
      const error = KvError.from(thrown, "KV_INTERNAL", `${call} failed in a worker`);
      answer = { id, error: error.toJSON() };
    }
    if (id !== undefined && this.#closed === undefined) this.send(answer);
  }
}

function errorOf({ code, message, hint, details }: NonNullable<Message["error"]>): KvError {
  return new KvError(code as KvErrorCode, message, {
    hint,
    details: details as Record<string, unknown>,
  });
}
