import type { ChildProcess } from "node:child_process";
import { KvError, type KvErrorCode } from "@kv/interface";

interface Call {
  readonly number: number;
  readonly name: string;
  readonly args: readonly never[];
}

interface Answer {
  readonly number: number;
  readonly value?: unknown;
  /** Of a call that failed. */
  readonly message?: string;
  readonly code?: KvErrorCode | undefined;
}

type Functions = Readonly<Record<string, (...args: never[]) => unknown>>;

/** Answers the calls of the parent process. */
export function answerCalls(functions: Functions): void {
  const send = (answer: Answer) => void process.send?.(answer);
  process.on("message", ({ number, name, args }: Call) => {
    (async () => functions[name]?.(...args))().then(
      (value) => send({ number, value }),
      (error: unknown) =>
        send({ number, message: String(error), code: KvError.is(error) ? error.code : undefined }),
    );
  });
}

/**
 * Calls the functions that a child answers with `answerCalls`. Calls without an answer reject with
 * `dead()` when it ends.
 */
export function callsTo<Of extends Functions>(child: ChildProcess, dead: () => Error) {
  const waiting = new Map<number, { resolve(value: never): void; reject(error: Error): void }>();
  let last = 0;
  child.on("message", ({ number, value, message, code }: Answer) => {
    const { resolve, reject } = waiting.get(number) ?? {};
    waiting.delete(number);
    if (message === undefined) resolve?.(value as never);
    else reject?.(code === undefined ? new Error(message) : new KvError(code, message));
  });
  child.once("exit", () => {
    for (const { reject } of waiting.values()) reject(dead());
    waiting.clear();
  });
  return <Name extends keyof Of & string>(name: Name, ...args: Parameters<Of[Name]>) => {
    if (!child.connected) return Promise.reject(dead());
    const number = ++last;
    return new Promise<Awaited<ReturnType<Of[Name]>>>((resolve, reject) => {
      waiting.set(number, { resolve, reject });
      // If the process has just ended, its exit rejects the call.
      child.send({ number, name, args }, () => {});
    });
  };
}
