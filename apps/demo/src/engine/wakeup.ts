/** Lets one loop sleep until there is something to do. A wake-up that comes before the sleep is not lost. */
export interface Wakeup {
  wake(): void;
  /** Resolves at the next wake-up, or at once when there was one since the last sleep. */
  sleep(): Promise<void>;
}

export function createWakeup(): Wakeup {
  let pending = false;
  let resume: (() => void) | undefined;
  return {
    wake() {
      pending = true;
      resume?.();
      resume = undefined;
    },
    async sleep() {
      if (!pending) {
        await new Promise<void>((resolve) => {
          resume = resolve;
        });
      }
      pending = false;
    },
  };
}
