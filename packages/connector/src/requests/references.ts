import { hash } from "node:crypto";
import { type Clock, KvError } from "@kv/interface";
import { isWireSafeRequestId, newCapability } from "@kv/protocol";
import type { RemoteRequest } from "./remote-request.js";

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

  has(key: Key): boolean {
    return this.#entries.has(key);
  }

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

  get oldest(): { readonly key: Key; readonly value: Value } | undefined {
    return this.#oldest;
  }

  get size(): number {
    return this.#entries.size;
  }

  clear(): void {
    this.#entries.clear();
    this.#oldest = undefined;
    this.#newest = undefined;
  }
}

/**
 * A set of keys that expire, bounded in time and in number. It recognises messages that arrive late
 * or twice.
 */
export class ExpiringSet {
  readonly #options: {
    readonly clock: Clock;
    readonly ttlMs: number;
    readonly maxSize: number;
  };
  readonly #addedAtMs = new OldestFirst<string, number>();

  /**
   * A key stays for `ttlMs` after it was last added. Beyond `maxSize` keys, the oldest leave first.
   */
  constructor(options: {
    readonly clock: Clock;
    readonly ttlMs: number;
    readonly maxSize: number;
  }) {
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

  clear(): void {
    this.#addedAtMs.clear();
  }

  #isLive(atMs: number): boolean {
    return this.#options.clock.now() - atMs < this.#options.ttlMs;
  }
}

/** One use of a request's blocks. */
export interface Generation {
  readonly requestId: string;
  /**
   * The id of the request in notifications and heartbeats. The engine's own id, as in vLLM, unless
   * that id was used recently (a notification for the earlier use may still arrive), is too long,
   * or would be misparsed (see `isWireSafeRequestId`).
   */
  readonly wireId: string;
  readonly generation: number;
  /** Only those who are told it may act on the request, see `newCapability`. */
  readonly capability: string;
}

/**
 * Longer ids would make a heartbeat of a few hundred requests too long for one notification. vLLM's
 * have about 60 characters.
 */
const MAX_WIRE_ID_LENGTH = 160;

/**
 * Distinguishes one use of a request's blocks from the next. A generation begins when blocks are
 * kept for a peer and ends when they go back to the engine. A reference to an ended generation is
 * stale: the blocks may hold another request's KV.
 */
export class Generations {
  readonly #clock: Clock;
  readonly #rememberMs: number;
  readonly #byRequestId = new OldestFirst<string, Generation>();
  readonly #byWireId = new Map<string, Generation>();
  readonly #endedAtMs = new OldestFirst<string, number>();
  #last = 0;

  /** `rememberMs`: how long an ended id is remembered; notifications under way arrive within it. */
  constructor({
    clock,
    rememberMs = 600_000,
  }: { readonly clock: Clock; readonly rememberMs?: number | undefined }) {
    this.#clock = clock;
    this.#rememberMs = rememberMs;
  }

  begin(requestId: string): Generation {
    const current = this.#byRequestId.get(requestId);
    if (current !== undefined) return current;
    this.#forgetOld();
    let wireId: string;
    do {
      this.#last += 1;
      wireId = this.#wireIdOf(requestId);
    } while (this.#byWireId.has(wireId));
    const generation: Generation = {
      requestId,
      wireId,
      generation: this.#last,
      capability: newCapability(),
    };
    this.#byRequestId.set(requestId, generation);
    this.#byWireId.set(wireId, generation);
    return generation;
  }

  /** Ends the request's generation. Its number is never used again. */
  end(requestId: string): void {
    const current = this.#byRequestId.get(requestId);
    if (current === undefined) return;
    this.#byRequestId.delete(requestId);
    this.#byWireId.delete(current.wireId);
    this.#endedAtMs.set(requestId, this.#clock.now());
  }

  get oldestOpen(): number | undefined {
    return this.#byRequestId.oldest?.value.generation;
  }

  byRequestId(requestId: string): Generation | undefined {
    return this.#byRequestId.get(requestId);
  }

  byWireId(wireId: string): Generation | undefined {
    return this.#byWireId.get(wireId);
  }

  clear(): void {
    this.#byRequestId.clear();
    this.#byWireId.clear();
    this.#endedAtMs.clear();
  }

  get size(): number {
    return this.#byRequestId.size;
  }

  #wireIdOf(requestId: string): string {
    const isTaken = this.#endedAtMs.has(requestId) || this.#byWireId.has(requestId);
    if (!isTaken && requestId.length <= MAX_WIRE_ID_LENGTH && isWireSafeRequestId(requestId))
      return requestId;
    const start = requestId.slice(0, MAX_WIRE_ID_LENGTH / 2).replaceAll(",", "_");
    const wireId = `${start}.g${this.#last}`;
    return isWireSafeRequestId(wireId) ? wireId : `r.${wireId}`;
  }

  #forgetOld(): void {
    const horizonMs = this.#clock.now() - this.#rememberMs;
    for (let { oldest } = this.#endedAtMs; oldest !== undefined; { oldest } = this.#endedAtMs) {
      if (oldest.value > horizonMs) break;
      this.#endedAtMs.delete(oldest.key);
    }
  }
}

interface ReferencesOptions {
  readonly clock: Clock;
  /** How long a released reference is refused, in ms: at least P's lease. */
  readonly rememberMs: number;
  readonly maxReaders: number;
  /** References in use and released ones together. @default 262,144 */
  readonly maxReferences?: number | undefined;
}

/** A reference and the requests of this engine that read it. */
export interface RemoteReference {
  readonly key: string;
  readonly registrationGeneration: number;
  readers: number;
  releasedAtMs: number;
}

/**
 * The references to blocks at P's, each with its readers at this engine. A vLLM P frees the blocks
 * with the first notification of this engine, and one of `@kv` too, so P is notified when the last
 * reader is done. From then on the reference is refused: P may have given the blocks to another
 * request, and a READ of them succeeds all the same (vllm-project/vllm#52234, #43509).
 */
export class RemoteReferences {
  readonly #options: ReferencesOptions;
  readonly #inUse = new Map<string, RemoteReference>();
  readonly #released = new OldestFirst<string, RemoteReference>();

  constructor(options: ReferencesOptions) {
    this.#options = options;
  }

  /**
   * Adds a reader of a reference, and returns what `remove` takes.
   * @throws `KV_REFERENCE_USED` for one that this engine has released, or that has as many readers
   * as it may have; `KV_REFERENCES_FULL` for a new one when there is no room to remember it.
   */
  add(remote: RemoteRequest): RemoteReference {
    this.#forgetOld();
    const key = keyOf(remote);
    const { maxReaders, maxReferences = 262_144 } = this.#options;
    const released = this.#released.get(key);
    if (released !== undefined) {
      if (isSameRegistration(released, remote)) throw usedError(remote, "has released them");
      // P has registered its cache again since then, so the id names another use of its blocks.
      this.#released.delete(key);
    }
    const known = this.#inUse.get(key);
    if (known !== undefined && isSameRegistration(known, remote)) {
      if (known.readers >= maxReaders)
        throw usedError(remote, "already gives them to another request");
      known.readers += 1;
      return known;
    }
    if (this.#inUse.size + this.#released.size >= maxReferences)
      throw fullError(remote, maxReferences);
    const { registrationGeneration = 0 } = remote;
    const reference = { key, registrationGeneration, readers: 1, releasedAtMs: 0 };
    this.#inUse.set(key, reference);
    return reference;
  }

  /**
   * Removes a reader. Returns true for the last one: P is to be notified, and the reference is
   * refused from now on.
   */
  remove(reference: RemoteReference): boolean {
    const { key } = reference;
    // A later registration of P's cache has replaced it: there is nobody to notify.
    if (this.#inUse.get(key) !== reference) return false;
    reference.readers -= 1;
    if (reference.readers > 0) return false;
    reference.releasedAtMs = this.#options.clock.now();
    this.#inUse.delete(key);
    this.#released.set(key, reference);
    return true;
  }

  clear(): void {
    this.#inUse.clear();
    this.#released.clear();
  }

  #forgetOld(): void {
    const horizonMs = this.#options.clock.now() - this.#options.rememberMs;
    for (let { oldest } = this.#released; oldest !== undefined; { oldest } = this.#released) {
      if (oldest.value.releasedAtMs > horizonMs) break;
      this.#released.delete(oldest.key);
    }
  }
}

/**
 * Names one use of a request's blocks; short also where the ids are long. Another address of the
 * same engine is the same reference. A transfer id counts only where P has not named blocks yet.
 */
function keyOf({ engineId, requestId, lease, blocks, transferId }: RemoteRequest): string {
  const { incarnation, generation, capability } = lease ?? {};
  const early = blocks === undefined && transferId !== undefined ? [transferId] : [];
  return hash(
    "sha256",
    JSON.stringify([engineId, requestId, incarnation, generation, capability, ...early]),
    "base64",
  );
}

/**
 * A vLLM P counts how often it has registered its cache; parameters without the number (0) may be
 * of any registration.
 */
function isSameRegistration(
  { registrationGeneration: known }: Pick<RemoteReference, "registrationGeneration">,
  { registrationGeneration: given = 0 }: RemoteRequest,
): boolean {
  return known === given || known === 0 || given === 0;
}

function usedError({ engineId, requestId }: RemoteRequest, what: string): KvError {
  return new KvError(
    "KV_REFERENCE_USED",
    `kv_transfer_params name the blocks of request ${requestId} at engine ${engineId}, and this engine ${what}: they may hold another request's KV`,
    {
      hint: "send the prompt to a prefill worker again, and use each answer of it once",
      details: { engineId, requestId },
    },
  );
}

function fullError({ engineId, requestId }: RemoteRequest, maxReferences: number): KvError {
  return new KvError(
    "KV_REFERENCES_FULL",
    `request ${requestId} of engine ${engineId} is refused: this engine remembers ${maxReferences} references to prefilled blocks, and no more`,
    {
      hint: "send the request to another decode worker; references are forgotten some time after their lease",
      details: { maxReferences },
    },
  );
}
