/**
 * Rejects with the signal's reason as soon as it aborts. A result that arrives after that is given to `unwanted`. Errors: those of `work`; the
 * signal's reason.
 */
export function whileNotAborted<T>(
  work: Promise<T>,
  signal: AbortSignal,
  unwanted: (result: T) => void,
): Promise<T> {
  return new Promise((resolve, reject) => {
    const onAbort = () => reject(signal.reason as Error);
    if (signal.aborted) onAbort();
    else signal.addEventListener("abort", onAbort);
    work.then(
      (result) => {
        signal.removeEventListener("abort", onAbort);
        if (signal.aborted) unwanted(result);
        else resolve(result);
      },
      (error: unknown) => {
        signal.removeEventListener("abort", onAbort);
        reject(error as Error);
      },
    );
  });
}
