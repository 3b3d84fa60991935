import { ExpiringSet, type ExpiringSetOptions } from "@kv/connector/building-blocks";
import { baseRequestId, type Registration } from "@kv/protocol";

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
 * The names that a peer may use for a producer's request, besides its own id. The first is the id
 * without the suffix of eight hex digits that vLLM appends to each request id, so both legs of a
 * client's request share it. The second is the id that the proxy chose: vLLM turns an
 * `X-Request-Id` into `cmpl-{id}-{index}-{suffix}`, and the heartbeats of a vLLM 0.33 push consumer
 * carry the proxy's id.
 */
export function requestAliases(requestId: string): readonly string[] {
  const base = baseRequestId(requestId);
  const proxy = /^(?:cmpl|chatcmpl)-(.+?)(?:-\d+)?$/.exec(base)?.[1];
  return proxy === undefined ? [base] : [base, proxy];
}

/**
 * The names under which a registration waits: the exact request if it names one, else the transfer
 * id and the base id.
 */
export function namesOf({ own, matchId, transferId }: Registration): readonly string[] {
  if (own?.prefill !== undefined) return [exactName(own.prefill.wireId)];
  return transferId === undefined
    ? [baseRequestId(matchId)]
    : [transferName(transferId), baseRequestId(matchId)];
}

/** No registration waits under the empty name. */
export function transferName(transferId: string | undefined): string {
  return transferId === undefined ? "" : `+${transferId}`;
}

/** The name of a registration that names the request itself. */
export function exactName(wireId: string): string {
  return `=${wireId}`;
}

/** The names of requests that have ended. */
export class EndedNames {
  /** Base ids of requests that had no transfer id. */
  readonly #ids: ExpiringSet;
  /** Base ids and transfer ids of the others. */
  readonly #names: ExpiringSet;

  constructor(options: ExpiringSetOptions) {
    this.#ids = new ExpiringSet(options);
    this.#names = new ExpiringSet(options);
  }

  /** Remembers the names of a request. */
  add(baseId: string, transferId: string | undefined): void {
    if (transferId === undefined) this.#ids.add(baseId);
    else for (const name of [`id ${baseId}`, `transfer ${transferId}`]) this.#names.add(name);
  }

  /**
   * Whether one with this transfer id has ended, or where one of the two has none, with this base
   * id.
   */
  has(baseId: string, transferId: string | undefined): boolean {
    const name = transferId === undefined ? `id ${baseId}` : `transfer ${transferId}`;
    return this.#ids.has(baseId) || this.#names.has(name);
  }

  /** Forgets all names. */
  clear(): void {
    this.#ids.clear();
    this.#names.clear();
  }
}
