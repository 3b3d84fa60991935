import type { KvError } from "@kv/interface";

/** Word that something is to end early: an `AbortSignal` that costs nothing while nobody asks for one, as every leg of every request has it. */
export interface Ending {
  readonly ended: boolean;
  /** Why; undefined until it has ended. */
  readonly reason: KvError | undefined;
  /** For whatever takes an `AbortSignal`; its reason is `reason`. */
  readonly signal: AbortSignal;
  /** Calls `listener` once when it ends, at once where it has. Answers what takes the listener away again. */
  onEnd(listener: () => void): () => void;
}

export function createEnding(): Ending & { end(reason: KvError): void } {
  return new OneEnding();
}

const nothing = () => {};

/** A class, as every request has one: methods are then made once for all. */
class OneEnding implements Ending {
  reason: KvError | undefined = undefined;
  #controller: AbortController | undefined = undefined;
  #listeners: (() => void)[] | undefined = undefined;

  get ended(): boolean {
    return this.reason !== undefined;
  }

  get signal(): AbortSignal {
    if (this.#controller === undefined) {
      this.#controller = new AbortController();
      if (this.reason !== undefined) this.#controller.abort(this.reason);
    }
    return this.#controller.signal;
  }

  onEnd(listener: () => void): () => void {
    if (this.reason !== undefined) {
      listener();
      return nothing;
    }
    this.#listeners ??= [];
    this.#listeners.push(listener);
    return () => this.#leave(listener);
  }

  #leave(listener: () => void): void {
    const at = this.#listeners?.indexOf(listener) ?? -1;
    if (at !== -1) this.#listeners?.splice(at, 1);
  }

  end(why: KvError): void {
    if (this.reason !== undefined) return;
    this.reason = why;
    this.#controller?.abort(why);
    const told = this.#listeners ?? [];
    this.#listeners = undefined;
    for (const listener of told) listener();
  }
}
