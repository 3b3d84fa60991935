export class RefCount {
  readonly #onChange: (used: boolean) => void;
  #count = 0;

  /** `onChange(true)` is called for the first user, `onChange(false)` after the last one. */
  constructor(onChange: (used: boolean) => void = () => {}) {
    this.#onChange = onChange;
  }

  get count(): number {
    return this.#count;
  }

  /** Each `acquire` needs exactly one `release`. */
  acquire(): void {
    this.#count += 1;
    if (this.#count === 1) this.#onChange(true);
  }

  release(): void {
    this.#count -= 1;
    if (this.#count === 0) this.#onChange(false);
  }

  /** The returned function removes the user, once. */
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
