/**
 * 1 while the model's thread loads or runs a step. ONNX Runtime aborts the process (exit code 134)
 * when Node ends the thread during a call, so the process waits for it at its exit.
 */
export type BusyFlag = Int32Array<SharedArrayBuffer>;

export function busyFlag(): BusyFlag {
  return new Int32Array(new SharedArrayBuffer(4)).fill(1);
}

export function setBusy(flag: BusyFlag): void {
  Atomics.store(flag, 0, 1);
}

export function setIdle(flag: BusyFlag): void {
  Atomics.store(flag, 0, 0);
  Atomics.notify(flag, 0);
}

/** A step of the longest prompt takes seconds. */
const exitWaitMs = 10_000;

// One listener for all models: Node warns of a leak at eleven listeners.
const flags = new Set<BusyFlag>();
function waitForAll(): void {
  for (const flag of flags) Atomics.wait(flag, 0, 1, exitWaitMs);
}

/** Returns a function that ends the wait. */
export function waitAtExit(flag: BusyFlag): () => void {
  if (flags.size === 0) process.on("exit", waitForAll);
  flags.add(flag);
  return () => {
    flags.delete(flag);
    if (flags.size === 0) process.off("exit", waitForAll);
  };
}
