/**
 * Returns a function that resolves in a later macrotask. The microtask queue runs until it is empty
 * between two macrotasks, so one turn drains all promise work. It uses `setImmediate` where there
 * is one (about 1 us a turn), else `MessageChannel`, else `setTimeout`, which browsers clamp to 4
 * ms.
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

/** The members of MessagePort that browsers and Node share. */
interface Port {
  onmessage: (() => void) | null;
  postMessage(value: unknown): void;
  close(): void;
}
