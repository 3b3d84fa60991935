import { KvError, type KvErrorCode } from "@kv/interface";

/** What a process does for the one at the other end. Arguments and results are plain data. */
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
 * Calls between a worker and its primary, over the channel of `node:cluster`. The messages of one
 * direction stay in order.
 */
export class Calls {
  readonly #send: (message: object) => void;
  readonly #operations: Operations;
  readonly #pending = new Map<number, Pending>();
  /** Rejects when the other process ends. */
  readonly closed: Promise<never>;
  #reject: (error: KvError) => void = () => {};
  #nextId = 1;
  #closed: KvError | undefined = undefined;

  /** `operations`: what the other process may call here. */
  constructor(send: (message: object) => void, operations: Operations) {
    this.#send = send;
    this.#operations = operations;
    this.closed = new Promise((_, reject) => {
      this.#reject = reject;
    });
    this.closed.catch(() => {});
  }

  /**
   * Calls an operation of the other process.
   * @throws The errors of the operation; `KV_REQUEST_ABORTED` when the other process ends.
   */
  call<T>(name: string, argument?: unknown): Promise<T> {
    if (this.#closed !== undefined) return Promise.reject(this.#closed);
    const id = this.#nextId++;
    return new Promise<T>((resolve, reject) => {
      this.#pending.set(id, { resolve: resolve as Pending["resolve"], reject });
      this.#send({ call: name, argument, id } satisfies Call);
    });
  }

  /** Calls an operation without waiting for its answer. */
  tell(name: string, argument: unknown): void {
    if (this.#closed === undefined) this.#send({ call: name, argument } satisfies Call);
  }

  /** Takes a message of the other process. */
  receive(message: unknown): void {
    const { call, answer } = message as Partial<Call & Answer>;
    if (call !== undefined) void this.#serve(message as Call);
    else if (answer !== undefined) this.#answered(message as Answer);
  }

  /** The other process has ended: its answers will not come. */
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

/** An error that another process has sent. */
function errorOf({ code, message, hint, details }: NonNullable<Answer["error"]>): KvError {
  return new KvError(code as KvErrorCode, message, {
    hint,
    details: details as Record<string, unknown>,
  });
}
