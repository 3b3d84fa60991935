import type { KvError } from "@kv/interface";

const nothing = () => {};

/**
 * An abort that creates an `AbortSignal` only when `signal` is read. Each leg of each request listens for one, and hardly any reads the
 * signal.
 */
export class LazyAbort {
  #reason: KvError | undefined = undefined;
  #controller: AbortController | undefined = undefined;
  #listeners: (() => void)[] | undefined = undefined;

  /** Whether `abort` was called. */
  get aborted(): boolean {
    return this.#reason !== undefined;
  }

  /** Undefined until it is aborted. */
  get reason(): KvError | undefined {
    return this.#reason;
  }

  /** For calls that take an `AbortSignal`. The signal's reason is `reason`. */
  get signal(): AbortSignal {
    if (this.#controller === undefined) {
      this.#controller = new AbortController();
      if (this.#reason !== undefined) this.#controller.abort(this.#reason);
    }
    return this.#controller.signal;
  }

  /** Calls `listener` once, at the abort, or at once after it. Returns a function that removes the listener. */
  onAbort(listener: () => void): () => void {
    if (this.#reason !== undefined) {
      listener();
      return nothing;
    }
    this.#listeners ??= [];
    this.#listeners.push(listener);
    return () => this.#remove(listener);
  }

  /** Aborts, unless that has happened already: the first reason stays. */
  abort(reason: KvError): void {
    if (this.#reason !== undefined) return;
    this.#reason = reason;
    this.#controller?.abort(reason);
    const listeners = this.#listeners ?? [];
    this.#listeners = undefined;
    for (const listener of listeners) listener();
  }

  #remove(listener: () => void): void {
    const at = this.#listeners?.indexOf(listener) ?? -1;
    if (at !== -1) this.#listeners?.splice(at, 1);
  }
}
