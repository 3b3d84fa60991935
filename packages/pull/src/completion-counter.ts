import type { Log } from "@kv/interface";

interface Entry {
  readonly readers: Set<string>;
  expected: number;
}

/**
 * Counts the readers of each finished request. Every reader of one rank of P sends `"{id}:{n}"` once, where n is how many readers that rank
 * has; the rank is done with the request after n of them. A reader is an agent: a duplicate notification, or an abort after a completed
 * transfer, counts once.
 */
export class CompletionCounter {
  readonly #log: Log;
  readonly #entries = new Map<string, Entry>();

  constructor({ log }: { readonly log: Log }) {
    this.#log = log;
  }

  /** Counts a reader. Returns "complete" exactly once per request, which is then forgotten. */
  add(requestId: string, reader: string, expected: number): "complete" | "waiting" | "duplicate" {
    let entry = this.#entries.get(requestId);
    if (entry === undefined) {
      entry = { readers: new Set(), expected };
      this.#entries.set(requestId, entry);
    }
    if (entry.readers.has(reader)) return "duplicate";
    entry.readers.add(reader);
    if (entry.expected !== expected) {
      // The number follows from both sides' sizes, so readers of one engine agree: two engines got the same request. The greater number
      // frees later, and the lease bounds it.
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
