import type { Clock } from "@kv/interface";

interface Entry<Key, Value> {
  readonly key: Key;
  readonly value: Value;
  older: Entry<Key, Value> | undefined;
  newer: Entry<Key, Value> | undefined;
}

/**
 * A map that finds its oldest entry at once. In a `Map` from which the oldest entries leave, the
 * first step of an iteration passes all holes that they left.
 */
export class OldestFirst<Key, Value> {
  readonly #entries = new Map<Key, Entry<Key, Value>>();
  #oldest: Entry<Key, Value> | undefined;
  #newest: Entry<Key, Value> | undefined;

  /** Adds an entry as the newest one. An entry with this key is replaced. */
  set(key: Key, value: Value): void {
    this.delete(key);
    const entry: Entry<Key, Value> = { key, value, older: this.#newest, newer: undefined };
    if (this.#newest === undefined) this.#oldest = entry;
    else this.#newest.newer = entry;
    this.#newest = entry;
    this.#entries.set(key, entry);
  }

  /** The value of a key; undefined when there is none. */
  get(key: Key): Value | undefined {
    return this.#entries.get(key)?.value;
  }

  /** Whether there is an entry with this key. */
  has(key: Key): boolean {
    return this.#entries.has(key);
  }

  /** Removes an entry. Returns whether there was one. */
  delete(key: Key): boolean {
    const entry = this.#entries.get(key);
    if (entry === undefined) return false;
    const { older, newer } = entry;
    if (older === undefined) this.#oldest = newer;
    else older.newer = newer;
    if (newer === undefined) this.#newest = older;
    else newer.older = older;
    // In V8's old generation it would keep its neighbours, which keep theirs, until the next full
    // collection.
    entry.older = entry.newer = undefined;
    return this.#entries.delete(key);
  }

  /** The entry that was set first of those that are left. */
  get oldest(): { readonly key: Key; readonly value: Value } | undefined {
    return this.#oldest;
  }

  /** Number of entries. */
  get size(): number {
    return this.#entries.size;
  }

  /** Removes all entries. */
  clear(): void {
    this.#entries.clear();
    this.#oldest = undefined;
    this.#newest = undefined;
  }
}

/** The bounds of an expiring set. */
export interface ExpiringSetOptions {
  /** Times the keys. */
  readonly clock: Clock;
  /** How long a key stays after it was last added, in milliseconds. */
  readonly ttlMs: number;
  /** The most keys that are kept. The oldest leave first. */
  readonly maxSize: number;
}

/**
 * A set of keys that expire, bounded in time and in number. It recognises messages that arrive late
 * or twice.
 */
export class ExpiringSet {
  readonly #options: ExpiringSetOptions;
  /** When each key was last added. */
  readonly #addedAtMs = new OldestFirst<string, number>();

  constructor(options: ExpiringSetOptions) {
    this.#options = options;
  }

  /** Adds a key, or renews it, and removes the keys that have expired or are too many. */
  add(key: string): void {
    this.#addedAtMs.set(key, this.#options.clock.now());
    for (let { oldest } = this.#addedAtMs; oldest !== undefined; { oldest } = this.#addedAtMs) {
      if (this.#addedAtMs.size <= this.#options.maxSize && this.#isLive(oldest.value)) break;
      this.#addedAtMs.delete(oldest.key);
    }
  }

  /** True if the key was added less than `ttlMs` ago and was not removed to make room. */
  has(key: string): boolean {
    const atMs = this.#addedAtMs.get(key);
    return atMs !== undefined && this.#isLive(atMs);
  }

  /** Removes all keys. */
  clear(): void {
    this.#addedAtMs.clear();
  }

  #isLive(atMs: number): boolean {
    return this.#options.clock.now() - atMs < this.#options.ttlMs;
  }
}
