import { OldestFirst } from "@kv/connector/building-blocks";
import type { Clock } from "@kv/interface";

/** The bounds of an expiring set. */
export interface ExpiringSetOptions {
  readonly clock: Clock;
  /** How long a key stays after it was last added, in milliseconds. */
  readonly ttlMs: number;
  /** The most keys that are kept. The oldest leave first. */
  readonly maxSize: number;
}

/** A set of keys that expire, bounded in time and in number. It recognises messages that arrive late or twice. */
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
