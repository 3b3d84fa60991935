import { ExpiringSet } from "@kv/connector/building-blocks";
import type { Clock } from "@kv/interface";
import type { Registration } from "@kv/protocol";

/** Ended registrations that are remembered by their keys. */
const MAX_KEYS = 65_536;
/** Consumer processes whose watermarks are remembered. */
const MAX_CONSUMERS = 4096;

/**
 * The registrations that have ended at this producer rank, so that one that arrives late or twice is not served. Each is remembered by
 * its key for a while. Beyond that, each consumer process has a watermark: every message names the oldest generation that the consumer
 * has open, and a generation below it never becomes valid again.
 */
export class EndedRegistrations {
  readonly #keys: ExpiringSet;
  /** The oldest generation that is still valid, by consumer process; the process that was quiet for longest comes first. */
  readonly #watermarks = new Map<string, number>();

  constructor({ clock, rememberMs }: { readonly clock: Clock; readonly rememberMs: number }) {
    this.#keys = new ExpiringSet({ clock, ttlMs: rememberMs, maxSize: MAX_KEYS });
  }

  /** Remembers that the registration with this key has ended. */
  add(key: string): void {
    this.#keys.add(key);
  }

  /** True if the registration with this key has ended and is still remembered. */
  has(key: string): boolean {
    return this.#keys.has(key);
  }

  /**
   * Raises the watermark of the consumer process to the oldest open generation that the registration names. Returns false if the
   * registration's own generation lies below the watermark. A vLLM consumer sends no generation: the result is always true.
   */
  isOpen({ engineId, own }: Registration): boolean {
    if (own === undefined) return true;
    const process = JSON.stringify([engineId, own.incarnation, own.secret]);
    const watermark = Math.max(this.#watermarks.get(process) ?? 0, own.oldestOpen);
    this.#watermarks.delete(process);
    this.#watermarks.set(process, watermark);
    const [oldest] = this.#watermarks.keys();
    if (this.#watermarks.size > MAX_CONSUMERS && oldest !== undefined) this.#watermarks.delete(oldest);
    return own.generation >= watermark;
  }
}
