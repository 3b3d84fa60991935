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
  let reason: KvError | undefined;
  let controller: AbortController | undefined;
  let listeners: Set<() => void> | undefined;
  return {
    get ended() {
      return reason !== undefined;
    },
    get reason() {
      return reason;
    },
    get signal() {
      if (controller === undefined) {
        controller = new AbortController();
        if (reason !== undefined) controller.abort(reason);
      }
      return controller.signal;
    },
    onEnd(listener) {
      if (reason !== undefined) {
        listener();
        return () => {};
      }
      listeners ??= new Set();
      listeners.add(listener);
      return () => void listeners?.delete(listener);
    },
    end(why) {
      if (reason !== undefined) return;
      reason = why;
      controller?.abort(why);
      const told = listeners ?? [];
      listeners = undefined;
      for (const listener of told) listener();
    },
  };
}
