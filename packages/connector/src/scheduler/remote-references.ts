import { createHash } from "node:crypto";
import { type Clock, KvError } from "@kv/interface";
import { OldestFirst } from "./oldest-first.js";
import type { RemoteRequest } from "./step-types.js";

/** Options of `RemoteReferences`. */
export interface RemoteReferencesOptions {
  readonly clock: Clock;
  /** How long a released reference is refused, in ms: at least P's lease. */
  readonly rememberMs: number;
  /** Requests that may share a reference. */
  readonly maxReaders: number;
  /** References in use and released ones together. @default 262,144 */
  readonly maxReferences?: number | undefined;
}

/** A reference and the requests of this engine that read it. */
interface Entry {
  readonly registrationGeneration: number;
  readers: number;
  /** When the last reader was done. */
  releasedAtMs: number;
}

/**
 * The references to blocks at P's, each with its readers at this engine. A vLLM P frees the blocks with the first notification of this engine, and one
 * of `@kv` too, so P is notified when the last reader is done. From then on the reference is refused: P may have given the blocks to another request,
 * and a READ of them succeeds all the same (vllm-project/vllm#52234, #43509).
 */
export class RemoteReferences {
  readonly #options: RemoteReferencesOptions;
  readonly #inUse = new Map<string, Entry>();
  readonly #released = new OldestFirst<string, Entry>();

  constructor(options: RemoteReferencesOptions) {
    this.#options = options;
  }

  /**
   * Adds a reader of a reference. Errors: `KV_REFERENCE_USED` for one that this engine has released, or that has as many readers as it may have;
   * `KV_REFERENCES_FULL` for a new one when there is no room to remember it.
   */
  add(remote: RemoteRequest): void {
    this.#forgetOld();
    const key = keyOf(remote);
    const { maxReaders, maxReferences = 262_144 } = this.#options;
    const released = this.#released.get(key);
    if (released !== undefined) {
      if (isSameRegistration(released, remote)) throw usedError(remote, "has released them");
      // P has registered its cache again since then, so the id names another use of its blocks.
      this.#released.delete(key);
    }
    const entry = this.#inUse.get(key);
    if (entry !== undefined && isSameRegistration(entry, remote)) {
      if (entry.readers >= maxReaders) throw usedError(remote, "already gives them to another request");
      entry.readers += 1;
      return;
    }
    if (this.#inUse.size + this.#released.size >= maxReferences) throw fullError(remote, maxReferences);
    const { registrationGeneration = 0 } = remote;
    this.#inUse.set(key, { registrationGeneration, readers: 1, releasedAtMs: 0 });
  }

  /** Removes a reader. Returns true for the last one: P is to be notified, and the reference is refused from now on. */
  remove(remote: RemoteRequest): boolean {
    const key = keyOf(remote);
    const entry = this.#inUse.get(key);
    // A later registration of P's cache has replaced it: there is nobody to notify.
    if (entry === undefined || !isSameRegistration(entry, remote)) return false;
    entry.readers -= 1;
    if (entry.readers > 0) return false;
    entry.releasedAtMs = this.#options.clock.now();
    this.#inUse.delete(key);
    this.#released.set(key, entry);
    return true;
  }

  /** Forgets all references. */
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

/** Names one use of a request's blocks; short also where the ids are long. Another address of the same engine is the same reference. */
function keyOf({ engineId, requestId, lease }: RemoteRequest): string {
  const { incarnation, generation, capability } = lease ?? {};
  return createHash("sha256")
    .update(JSON.stringify([engineId, requestId, incarnation, generation, capability]))
    .digest("base64url");
}

/** A vLLM P counts how often it has registered its cache; parameters without the number (0) may be of any registration. */
function isSameRegistration(
  { registrationGeneration: known }: Pick<Entry, "registrationGeneration">,
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
