import { baseRequestId } from "@kv/protocol";

/** Finds values by a name that several of them may share. */
export class AliasIndex<T extends string | object> {
  /** The value of a name, or the set of its values: most names have one. */
  readonly #byName = new Map<string, T | Set<T>>();

  /** Adds a value under a name. */
  add(name: string, value: T): void {
    const values = this.#byName.get(name);
    if (values instanceof Set) values.add(value);
    else this.#byName.set(name, values === undefined ? value : new Set([values, value]));
  }

  /** Removes a value from a name; other names keep it. */
  delete(name: string, value: T): void {
    const values = this.#byName.get(name);
    if (values instanceof Set) values.delete(value);
    if (values === value || (values instanceof Set && values.size === 0)) this.#byName.delete(name);
  }

  /** The values under a name, in the order in which they were added. */
  get(name: string): Iterable<T> {
    const values = this.#byName.get(name);
    if (values === undefined) return [];
    return values instanceof Set ? values : [values];
  }

  /** Removes all values. */
  clear(): void {
    this.#byName.clear();
  }
}

/**
 * The names that a peer may use for a producer's request, besides its own id. The first is the id without the suffix of eight hex digits
 * that vLLM appends to each request id, so both legs of a client's request share it. The second is the id that the proxy
 * chose: vLLM turns an `X-Request-Id` into `cmpl-{id}-{index}-{suffix}`, and the heartbeats of a vLLM 0.33 push consumer carry the
 * proxy's id.
 */
export function requestAliases(requestId: string): readonly string[] {
  const base = baseRequestId(requestId);
  const proxy = /^(?:cmpl|chatcmpl)-(.+?)(?:-\d+)?$/.exec(base)?.[1];
  return proxy === undefined ? [base] : [base, proxy];
}
