import type { Clock } from "@kv/interface";
import { getOrAdd } from "../instances/pooled-instance.js";
import type { KvObject } from "./kv-object.js";

/** A D's object and its keys. */
export interface KeptObject extends KvObject {
  readonly server: string;
  readonly model: unknown;
  /** `TurnDigests.of` its tokens. */
  readonly digest: string;
  /** `TurnDigests.chunkOf` its tokens. */
  readonly chunk: string;
  readonly bytes: number | undefined;
}

/** The result of `KeptObjects.keep`. */
export interface KeepAnswer {
  /** False if it exceeds the budget; the caller then has D free it. */
  readonly kept: boolean;
  readonly release: readonly KeptObject[];
  readonly expired: readonly KeptObject[];
}

/** The result of `KeptObjects.find`. */
export interface FoundLengths {
  /** For each chunk that objects begin with, last chunk first: their lengths in tokens. */
  readonly tokens: readonly (readonly number[])[];
  /** D's that hold too much. Requests avoid them. */
  readonly crowded: readonly string[];
  readonly expired: readonly KeptObject[];
}

/** What is pinned at one D, for `/status`. */
export interface PinnedStatus {
  readonly server: string;
  readonly objects: number;
  /** Includes objects that are being read or freed. */
  readonly blocks: number;
  readonly bytes: number;
  readonly budget_blocks: number;
}

/** `kept`: for a further turn. `claimed`: a P may read it. `releasing`: D is asked to free it. */
type State = "kept" | "claimed" | "releasing";

interface Entry {
  readonly object: KeptObject;
  readonly expiresAtMs: number;
  state: State;
}

/** Longer than a release. D itself frees expired objects. */
const FREED_BY_D_MS = 10_000;
const MAX_LENGTHS = 1024;

/**
 * D's objects, each claimed by at most one caller. Above a D's budget, the object that waited
 * longest is released. All methods are synchronous, so claims in one process cannot race.
 */
export class KeptObjects {
  readonly #entries = new Map<string, Entry>();
  readonly #byDigest = new Map<string, Set<Entry>>();
  readonly #lengths = new Map<string, Map<number, number>>();
  readonly #servers = new Map<string, PinnedBlocks>();

  /** D surely holds an object for `ttlMs`. */
  constructor(private readonly options: { readonly clock: Clock; readonly ttlMs: number }) {}

  /**
   * Keeps an object that D has just answered, within a `budget` of blocks. Forgets the D's objects
   * of another engine or generation, whose blocks are gone.
   */
  keep(object: KeptObject, budget: number): KeepAnswer {
    const expired = this.#expire();
    if (this.#entries.has(keyOf(object))) {
      // Which of two objects with one id holds the blocks is unknown.
      this.ended(object);
      return { kept: false, release: [], expired };
    }
    const here = [...this.#entries.values()].filter((one) => one.object.server === object.server);
    for (const { object: other } of here)
      if (other.engineId !== object.engineId || other.generation < object.generation)
        this.ended(other);
    const { clock, ttlMs } = this.options;
    const entry: Entry = { object, expiresAtMs: clock.now() + ttlMs, state: "kept" };
    const pins = this.#pinsOf(object.server);
    pins.budget = budget;
    const release: KeptObject[] = [];
    const fits = () => pins.kept.size + pins.claimed.size + object.blocks.length <= budget;
    for (const other of this.#entries.values()) {
      if (fits()) break;
      if (other.object.server !== object.server || other.state !== "kept") continue;
      this.#move(other, "releasing");
      release.push(other.object);
    }
    const kept = fits();
    if (!kept) entry.state = "releasing";
    this.#entries.set(keyOf(object), entry);
    pins[entry.state].add(object, 1);
    if (kept) this.#index(entry);
    return { kept, release, expired };
  }

  find(chunks: readonly string[]): FoundLengths {
    const expired = this.#expire();
    const tokens: number[][] = [];
    let count = 0;
    for (let at = chunks.length - 1; at >= 0 && count < MAX_LENGTHS; at -= 1) {
      const lengths = this.#lengths.get(chunks[at] ?? "");
      if (lengths === undefined) continue;
      tokens.push([...lengths.keys()].sort((one, other) => other - one));
      count += lengths.size;
    }
    const crowded = [...this.#servers]
      .filter(([, pins]) => pins.sum("size") > pins.budget)
      .map(([server]) => server);
    return { tokens, crowded, expired };
  }

  /** Claims an object for the first of `digests` that has one. */
  claim(digests: readonly string[]): KeptObject | undefined {
    const entry = this.#first(digests);
    if (entry !== undefined) this.#move(entry, "claimed");
    return entry?.object;
  }

  tokensOf(digests: readonly string[]): number {
    return this.#first(digests)?.object.tokens ?? 0;
  }

  #first(digests: readonly string[]): Entry | undefined {
    for (const digest of digests) {
      const [entry] = this.#byDigest.get(digest) ?? [];
      if (entry !== undefined && entry.expiresAtMs > this.options.clock.now()) return entry;
    }
    return undefined;
  }

  giveBack(object: KvObject): void {
    const entry = this.#entries.get(keyOf(object));
    if (entry?.state === "claimed") this.#move(entry, "kept");
  }

  /** It stays pinned until `ended`. */
  releasing(object: KvObject): void {
    const entry = this.#entries.get(keyOf(object));
    if (entry !== undefined) this.#move(entry, "releasing");
  }

  ended(object: KvObject): void {
    const entry = this.#entries.get(keyOf(object));
    if (entry === undefined) return;
    this.#unindex(entry);
    this.#entries.delete(keyOf(object));
    const { server } = entry.object;
    const pins = this.#pinsOf(server);
    pins[entry.state].add(entry.object, -1);
    if (pins.sum("objects") === 0) this.#servers.delete(server);
  }

  drop(): readonly KeptObject[] {
    const dropped = [...this.#entries.values()].filter(({ state }) => state === "kept");
    for (const entry of dropped) this.#move(entry, "releasing");
    return dropped.map(({ object }) => object);
  }

  status(): readonly PinnedStatus[] {
    return [...this.#servers].map(([server, pins]) => ({
      server,
      objects: pins.kept.objects,
      blocks: pins.sum("size"),
      bytes: pins.sum("bytes"),
      budget_blocks: pins.budget,
    }));
  }

  #expire(): readonly KeptObject[] {
    const nowMs = this.options.clock.now();
    const expired: KeptObject[] = [];
    for (const entry of this.#entries.values()) {
      if (entry.expiresAtMs > nowMs) break;
      if (entry.state === "kept" && nowMs < entry.expiresAtMs + FREED_BY_D_MS)
        expired.push(entry.object);
      this.ended(entry.object);
    }
    return expired;
  }

  #move(entry: Entry, state: State): void {
    const pins = this.#pinsOf(entry.object.server);
    pins[entry.state].add(entry.object, -1);
    pins[state].add(entry.object, 1);
    if (entry.state === "kept") this.#unindex(entry);
    entry.state = state;
    if (state === "kept") this.#index(entry);
  }

  #index(entry: Entry): void {
    const { digest, chunk, tokens } = entry.object;
    getOrAdd(this.#byDigest, digest, () => new Set()).add(entry);
    addTo(
      getOrAdd(this.#lengths, chunk, () => new Map()),
      tokens,
      1,
    );
  }

  #unindex(entry: Entry): void {
    const { digest, chunk, tokens } = entry.object;
    const same = this.#byDigest.get(digest);
    if (same?.delete(entry) !== true) return;
    if (same.size === 0) this.#byDigest.delete(digest);
    const lengths = this.#lengths.get(chunk);
    if (lengths && addTo(lengths, tokens, -1).size === 0) this.#lengths.delete(chunk);
  }

  #pinsOf(server: string): PinnedBlocks {
    return getOrAdd(this.#servers, server, () => new PinnedBlocks());
  }
}

function keyOf({ engineId, requestId }: KvObject): string {
  return `${engineId}\n${requestId}`;
}

class PinnedBlocks {
  readonly kept = new BlockCounts();
  readonly claimed = new BlockCounts();
  readonly releasing = new BlockCounts();
  budget = 0;

  sum(of: "size" | "objects" | "bytes"): number {
    return this.kept[of] + this.claimed[of] + this.releasing[of];
  }
}

/** Counts blocks once: D's prefix cache shares them between equal prefixes. */
class BlockCounts {
  readonly #counts = new Map<number, number>();
  objects = 0;
  bytes = 0;

  get size(): number {
    return this.#counts.size;
  }

  /** `times`: -1 takes it away. */
  add({ blocks, bytes = 0 }: KeptObject, times: 1 | -1): void {
    this.objects += times;
    this.bytes += times * bytes;
    for (const block of blocks) addTo(this.#counts, block, times);
  }
}

/** Keeps only numbers whose count is above 0. */
function addTo(counts: Map<number, number>, number: number, by: 1 | -1): Map<number, number> {
  const count = (counts.get(number) ?? 0) + by;
  if (count === 0) counts.delete(number);
  else counts.set(number, count);
  return counts;
}
