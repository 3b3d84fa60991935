/**
 * Shared with the model's thread: 1 while it loads or runs a step. ONNX Runtime aborts the process (exit code 134)
 * when Node ends the thread in the middle of a call, so `process.exit` and an uncaught error wait for the call.
 */
export type BusyFlag = Int32Array<SharedArrayBuffer>;

/** Starts busy: the thread loads the model first. */
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

/** A step of the longest prompt takes seconds; a thread that does not answer must not hold the exit for ever. */
const exitWaitMs = 10_000;

// One listener for all models of the process: eleven would look like a leak.
const held = new Set<BusyFlag>();
function waitForAll(): void {
  for (const flag of held) Atomics.wait(flag, 0, 1, exitWaitMs);
}

/** Makes the process's exit wait while the flag is busy, until the function that is returned is called. */
export function holdExit(flag: BusyFlag): () => void {
  if (held.size === 0) process.on("exit", waitForAll);
  held.add(flag);
  return () => {
    if (held.delete(flag) && held.size === 0) process.off("exit", waitForAll);
  };
}
