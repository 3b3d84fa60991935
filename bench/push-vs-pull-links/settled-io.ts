/**
 * Resolves when everything that was ready in this process has run, also what passes through its own TCP connections: the kernel delivers loopback
 * data as it is written, so each turn of the event loop moves a message by one reader. `turns`: more than any chain of readers, promises and
 * immediates between two timers.
 */
export function settledIo(turns = 24): () => Promise<void> {
  return () =>
    new Promise((resolve) => {
      let left = turns;
      const next = () => {
        left -= 1;
        if (left === 0) resolve();
        else setImmediate(next);
      };
      setImmediate(next);
    });
}
