/** Lets one loop sleep until there is work. A wake-up before the sleep is not lost. */
export class Wakeup {
  #pending = false;
  #resume: (() => void) | undefined;

  wake(): void {
    this.#pending = true;
    this.#resume?.();
    this.#resume = undefined;
  }

  async sleep(): Promise<void> {
    if (!this.#pending) {
      await new Promise<void>((resolve) => {
        this.#resume = resolve;
      });
    }
    this.#pending = false;
  }
}
