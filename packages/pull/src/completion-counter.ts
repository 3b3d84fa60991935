import type { Log } from "@kv/interface";

/**
 * Counts the readers of a finished request. Each reader of one producer rank sends `"{id}:{n}"` once, where n is how many
 * readers that rank has; the rank is done with the request when n of them have spoken. A reader is an agent: what the
 * same agent says twice (a duplicate on the way, an abort after its transfer had landed) counts once.
 */
export interface Completions {
  /** `complete` exactly once per request: the entry is then forgotten. */
  note(id: string, reader: string, consumers: number): "complete" | "waiting" | "duplicate";
  /** Forgets the request (its lease ran out) and answers how many readers had spoken. */
  forget(id: string): number;
  readonly size: number;
}

interface Entry {
  readonly readers: Set<string>;
  consumers: number;
}

export function createCompletions({ log }: { log: Log }): Completions {
  const entries = new Map<string, Entry>();
  return {
    note(id, reader, consumers) {
      let entry = entries.get(id);
      if (entry === undefined) {
        entry = { readers: new Set(), consumers };
        entries.set(id, entry);
      }
      if (entry.readers.has(reader)) return "duplicate";
      entry.readers.add(reader);
      if (entry.consumers !== consumers) {
        // The number follows from both sides' sizes, so readers of one engine agree. Two engines were given the same
        // request, then: the greater number frees later, and the lease bounds it.
        log.warn("completion-consumers-disagree", {
          requestId: id,
          reader,
          announced: consumers,
          before: entry.consumers,
        });
        entry.consumers = Math.max(entry.consumers, consumers);
      }
      if (entry.readers.size < entry.consumers) return "waiting";
      entries.delete(id);
      return "complete";
    },
    forget(id) {
      const readers = entries.get(id)?.readers.size ?? 0;
      entries.delete(id);
      return readers;
    },
    get size() {
      return entries.size;
    },
  };
}
