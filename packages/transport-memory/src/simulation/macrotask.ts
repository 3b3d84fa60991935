/**
 * Resolves in a later macrotask. Between two macrotasks the microtask queue runs until it is empty, however long the
 * chains of promises are, so one such turn is enough to drain all promise work: counting `await`s is never enough.
 * `setImmediate` first (about 1 us a turn), then `MessageChannel`, then `setTimeout`, which browsers clamp to 4 ms.
 */
export function macrotaskTurn(): () => Promise<void> {
  const scope = globalThis as unknown as {
    setImmediate?: (run: () => void) => unknown;
    MessageChannel?: new () => { port1: Port; port2: Port };
  };
  if (typeof scope.setImmediate === "function") {
    const immediate = scope.setImmediate;
    return () => new Promise((resolve) => void immediate(resolve));
  }
  if (typeof scope.MessageChannel === "function") {
    const channel = scope.MessageChannel;
    // A channel per turn: a port that stays open would keep the process alive.
    return () =>
      new Promise((resolve) => {
        const { port1, port2 } = new channel();
        port1.onmessage = () => {
          port1.close();
          resolve();
        };
        port2.postMessage(0);
      });
  }
  return () => new Promise((resolve) => void setTimeout(resolve, 0));
}

/** The part of a MessagePort that browsers and Node have in common. */
interface Port {
  onmessage: (() => void) | null;
  postMessage(value: unknown): void;
  close(): void;
}
