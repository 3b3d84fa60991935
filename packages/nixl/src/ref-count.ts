/**
 * Counts the users of a resource. Reports when the first user arrives and when the last one leaves.
 */
export class RefCount {
  readonly #onChange: (used: boolean) => void;
  #count = 0;

  /** `onChange(true)` is called for the first user, `onChange(false)` after the last one. */
  constructor(onChange: (used: boolean) => void = () => {}) {
    this.#onChange = onChange;
  }

  /** Users at this moment. */
  get count(): number {
    return this.#count;
  }

  /** Adds a user. Each `acquire` needs exactly one `release`. */
  acquire(): void {
    this.#count += 1;
    if (this.#count === 1) this.#onChange(true);
  }

  /** Removes a user. */
  release(): void {
    this.#count -= 1;
    if (this.#count === 0) this.#onChange(false);
  }

  /** Adds a user; the returned function removes it, and does nothing when it is called again. */
  hold(): () => void {
    this.acquire();
    let released = false;
    return () => {
      if (released) return;
      released = true;
      this.release();
    };
  }
}
