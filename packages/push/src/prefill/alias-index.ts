/** Finds values by a name that several of them may share. */
export class AliasIndex<T> {
  readonly #byName = new Map<string, Set<T>>();

  /** Adds a value under a name. */
  add(name: string, value: T): void {
    const values = this.#byName.get(name) ?? new Set();
    this.#byName.set(name, values.add(value));
  }

  /** Removes a value from a name; other names keep it. */
  delete(name: string, value: T): void {
    const values = this.#byName.get(name);
    values?.delete(value);
    if (values?.size === 0) this.#byName.delete(name);
  }

  /** The values under a name, in the order in which they were added. */
  get(name: string): Iterable<T> {
    return this.#byName.get(name) ?? [];
  }

  /** Removes all values. */
  clear(): void {
    this.#byName.clear();
  }
}
