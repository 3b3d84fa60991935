import { KvError, type KvErrorCode } from "@kv/interface";

/** What the other process may call. Arguments and results are plain data. */
export type Operations = Readonly<Record<string, (argument: never) => unknown>>;

interface Call {
  readonly call: string;
  readonly argument?: unknown;
  /** Absent where no answer is wanted. */
  readonly id?: number;
}

interface Answer {
  readonly answer: number;
  readonly result?: unknown;
  readonly error?: ReturnType<KvError["toJSON"]>;
}

interface Pending {
  resolve(result: unknown): void;
  reject(error: KvError): void;
}

/**
 * Calls between a worker and its primary over `node:cluster`. Messages of one direction stay in
 * order.
 */
export class Calls {
  readonly #send: (message: object) => void;
  readonly #operations: Operations;
  readonly #pending = new Map<number, Pending>();
  /** Rejects when the other process ends. */
  readonly closed: Promise<never>;
  #reject: (error: KvError) => void = () => {};
  #nextId = 1;
  #closed: KvError | undefined;

  constructor(send: (message: object) => void, operations: Operations) {
    this.#send = send;
    this.#operations = operations;
    this.closed = new Promise((_, reject) => {
      this.#reject = reject;
    });
    this.closed.catch(() => {});
  }

  /** @throws The operation's errors; `KV_REQUEST_ABORTED` when the other process ends. */
  call<T>(name: string, argument?: unknown): Promise<T> {
    if (this.#closed !== undefined) return Promise.reject(this.#closed);
    const id = this.#nextId++;
    return new Promise<T>((resolve, reject) => {
      this.#pending.set(id, { resolve: resolve as Pending["resolve"], reject });
      this.#send({ call: name, argument, id } satisfies Call);
    });
  }

  tell(name: string, argument: unknown): void {
    if (this.#closed === undefined) this.#send({ call: name, argument } satisfies Call);
  }

  receive(message: unknown): void {
    const { call, answer } = message as Partial<Call & Answer>;
    if (call !== undefined) void this.#serve(message as Call);
    else if (answer !== undefined) this.#answered(message as Answer);
  }

  close(error: KvError): void {
    this.#closed = error;
    this.#reject(error);
    for (const { reject } of this.#pending.values()) reject(error);
    this.#pending.clear();
  }

  async #serve({ call, argument, id }: Call): Promise<void> {
    let answer: Omit<Answer, "answer">;
    try {
      answer = { result: await this.#operations[call]?.(argument as never) };
    } catch (thrown) {
      answer = {
        error: KvError.from(thrown, "KV_INTERNAL", `${call} failed in a worker`).toJSON(),
      };
    }
    if (id !== undefined && this.#closed === undefined) this.#send({ ...answer, answer: id });
  }

  #answered({ answer, result, error }: Answer): void {
    const pending = this.#pending.get(answer);
    this.#pending.delete(answer);
    if (error === undefined) pending?.resolve(result);
    else pending?.reject(errorOf(error));
  }
}

function errorOf({ code, message, hint, details }: NonNullable<Answer["error"]>): KvError {
  return new KvError(code as KvErrorCode, message, {
    hint,
    details: details as Record<string, unknown>,
  });
}
