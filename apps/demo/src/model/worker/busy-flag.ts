/**
 * Shared with the model's thread: 1 while it loads or runs a step. ONNX Runtime aborts the process
 * (exit code 134) when Node ends the thread during a call. So the process waits for the call when
 * it exits.
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

/**
 * A step of the longest prompt takes seconds. A thread that hangs must not block the exit for ever.
 */
const exitWaitMs = 10_000;

// One listener for all models: Node warns of a leak at eleven listeners.
const flags = new Set<BusyFlag>();
function waitForAll(): void {
  for (const flag of flags) Atomics.wait(flag, 0, 1, exitWaitMs);
}

/** Makes the process wait at its exit while the flag is busy. Returns a function that ends this. */
export function waitAtExit(flag: BusyFlag): () => void {
  if (flags.size === 0) process.on("exit", waitForAll);
  flags.add(flag);
  return () => {
    if (flags.delete(flag) && flags.size === 0) process.off("exit", waitForAll);
  };
}
