import { baseRequestId } from "@kv/connector";

/**
 * Names under which a peer may speak of a producer's request besides its own: without the suffix of eight hex digits that vLLM adds to
 * each request (so the two legs of a client's request meet), and as the proxy called it, which is what vLLM 0.33's push heartbeats
 * carry: `X-Request-Id` becomes `cmpl-{id}-{index}-{suffix}`.
 */
export function namesOf(requestId: string): readonly string[] {
  const base = baseRequestId(requestId);
  const proxy = /^(?:cmpl|chatcmpl)-(.+?)(?:-\d+)?$/.exec(base)?.[1];
  return proxy === undefined ? [base] : [base, proxy];
}

/** A set of keys by one of their names, in order of arrival. */
export interface NameIndex<T> {
  add(name: string, value: T): void;
  delete(name: string, value: T): void;
  of(name: string): Iterable<T>;
}

export function createNameIndex<T>(): NameIndex<T> {
  const sets = new Map<string, Set<T>>();
  return {
    add(name, value) {
      const set = sets.get(name) ?? new Set();
      sets.set(name, set.add(value));
    },
    delete(name, value) {
      const set = sets.get(name);
      set?.delete(value);
      if (set?.size === 0) sets.delete(name);
    },
    of: (name) => sets.get(name) ?? [],
  };
}
