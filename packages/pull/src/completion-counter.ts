import type { Log } from "@kv/interface";

interface Entry {
  readonly readers: Set<string>;
  expected: number;
}

/**
 * Counts the readers of each finished request. Every reader of one rank of P sends `"{id}:{n}"` once, where n is the number of readers that this rank
 * has. The rank is done with the request after n readers. A reader is an agent: a duplicate notification, or an abort after a completed
 * transfer, counts once.
 */
export class CompletionCounter {
  readonly #log: Log;
  readonly #entries = new Map<string, Entry>();

  constructor({ log }: { readonly log: Log }) {
    this.#log = log;
  }

  /** Counts a reader. Returns "complete" exactly once per request, and then forgets the request. */
  add(requestId: string, reader: string, expected: number): "complete" | "waiting" | "duplicate" {
    let entry = this.#entries.get(requestId);
    if (entry === undefined) {
      entry = { readers: new Set(), expected };
      this.#entries.set(requestId, entry);
    }
    if (entry.readers.has(reader)) return "duplicate";
    entry.readers.add(reader);
    if (entry.expected !== expected) {
      // The number depends on the sizes of both engines, so the readers of one engine agree. Here two engines got the same request. The greater number
      // frees the blocks later, at the end of the lease at the latest.
      this.#log.warn("completion-consumers-disagree", {
        requestId,
        reader,
        announced: expected,
        before: entry.expected,
      });
      entry.expected = Math.max(entry.expected, expected);
    }
    if (entry.readers.size < entry.expected) return "waiting";
    this.#entries.delete(requestId);
    return "complete";
  }

  /** Forgets a request and returns how many readers were done. */
  forget(requestId: string): number {
    const readers = this.#entries.get(requestId)?.readers.size ?? 0;
    this.#entries.delete(requestId);
    return readers;
  }

  /** Requests with some readers done and others not. */
  get size(): number {
    return this.#entries.size;
  }
}
