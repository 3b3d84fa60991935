import type { Clock } from "@kv/interface";
import type { KvObject } from "./kv-object.js";

/** An object of a D with what finds it. */
export interface KeptObject extends KvObject {
  readonly server: string;
  readonly model: unknown;
  /** `TurnDigests.of` its tokens. */
  readonly digest: string;
  /** `TurnDigests.chunkOf` its tokens. */
  readonly chunk: string;
  readonly bytes: number | undefined;
}

/** What `KeptObjects.keep` has done. */
export interface KeepAnswer {
  /** False: there is no room for it in the budget, and the caller has D free it. */
  readonly kept: boolean;
  readonly release: readonly KeptObject[];
  readonly expired: readonly KeptObject[];
}

/** What `KeptObjects.find` has found. */
export interface FoundLengths {
  /**
   * For each chunk that objects begin with, from the last to the first, their numbers of tokens.
   */
  readonly tokens: readonly (readonly number[])[];
  /**
   * D's that hold more for further turns than they should: no request goes there that another D can
   * take.
   */
  readonly crowded: readonly string[];
  readonly expired: readonly KeptObject[];
}

/** What is pinned at one D, as JSON for `/status`. */
export interface PinnedStatus {
  readonly server: string;
  readonly objects: number;
  /** Blocks that it holds for them; those that are being read or freed count too. */
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

/** Longer than a release takes. D frees what has expired by itself. */
const FREED_BY_D_MS = 10_000;
/** More begins than one prompt has of conversations. */
const MAX_LENGTHS = 1024;

/**
 * The objects of D's, each used at most once: by `claim` it goes to one caller, and is gone for all
 * others. What is pinned at a D stays below a budget: the object that waits for longest is given
 * back first. All methods are synchronous, so that one process is one place where objects are
 * claimed.
 */
export class KeptObjects {
  readonly #clock: Clock;
  readonly #ttlMs: number;
  /** By engine and request id, in the order in which they were kept. */
  readonly #entries = new Map<string, Entry>();
  readonly #byDigest = new Map<string, Set<Entry>>();
  /** By chunk, how many kept objects have so many tokens. */
  readonly #lengths = new Map<string, Map<number, number>>();
  readonly #servers = new Map<string, PinnedBlocks>();

  /** `ttlMs`: how long D surely holds an object. */
  constructor({ clock, ttlMs }: { readonly clock: Clock; readonly ttlMs: number }) {
    this.#clock = clock;
    this.#ttlMs = ttlMs;
  }

  /**
   * Keeps an object that D has just answered. `budget`: the most blocks that objects may pin at
   * this D. Objects of another engine under the D's name, or of an older generation, are forgotten:
   * their blocks are gone.
   */
  keep(object: KeptObject, budget: number): KeepAnswer {
    const expired = this.#expire();
    if (this.#entries.has(keyOf(object))) {
      // The same id twice: which of both holds the blocks is not known, so neither is used.
      this.ended(object);
      return { kept: false, release: [], expired };
    }
    for (const { object: other } of this.#entries.values())
      if (
        other.server === object.server &&
        (other.engineId !== object.engineId || other.generation < object.generation)
      )
        this.ended(other);
    const entry: Entry = { object, expiresAtMs: this.#clock.now() + this.#ttlMs, state: "kept" };
    const pins = this.#pinsOf(object.server);
    pins.budget = budget;
    const release: KeptObject[] = [];
    for (const other of this.#entries.values()) {
      if (pins.kept.size + pins.claimed.size + object.blocks.length <= budget) break;
      if (other.object.server !== object.server || other.state !== "kept") continue;
      this.#move(other, "releasing");
      release.push(other.object);
    }
    const kept = pins.kept.size + pins.claimed.size + object.blocks.length <= budget;
    if (!kept) entry.state = "releasing";
    this.#entries.set(keyOf(object), entry);
    pins[entry.state].add(object);
    if (kept) this.#index(entry);
    return { kept, release, expired };
  }

  /**
   * Finds the numbers of tokens that kept objects have, which begin with one of a prompt's chunks.
   */
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

  /**
   * Gives an object with the first of `digests` that one has, to this caller alone; undefined where
   * none has one.
   */
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
      if (entry !== undefined && entry.expiresAtMs > this.#clock.now()) return entry;
    }
    return undefined;
  }

  giveBack(object: KvObject): void {
    const entry = this.#entries.get(keyOf(object));
    if (entry?.state === "claimed") this.#move(entry, "kept");
  }

  /** The object is being freed at D. It counts as pinned until `ended`. */
  releasing(object: KvObject): void {
    const entry = this.#entries.get(keyOf(object));
    if (entry !== undefined) this.#move(entry, "releasing");
  }

  /** D holds nothing for the object any more. */
  ended(object: KvObject): void {
    const entry = this.#entries.get(keyOf(object));
    if (entry === undefined) return;
    this.#unindex(entry);
    this.#entries.delete(keyOf(object));
    const { server } = entry.object;
    const pins = this.#pinsOf(server);
    pins[entry.state].remove(entry.object);
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

  /**
   * Forgets what has expired. Returns the objects that D may still hold and that nobody has
   * claimed.
   */
  #expire(): readonly KeptObject[] {
    const nowMs = this.#clock.now();
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
    pins[entry.state].remove(entry.object);
    pins[state].add(entry.object);
    if (entry.state === "kept") this.#unindex(entry);
    entry.state = state;
    if (state === "kept") this.#index(entry);
  }

  #index(entry: Entry): void {
    const { digest, chunk, tokens } = entry.object;
    const same = this.#byDigest.get(digest) ?? new Set();
    this.#byDigest.set(digest, same.add(entry));
    const lengths = this.#lengths.get(chunk) ?? new Map<number, number>();
    this.#lengths.set(chunk, lengths.set(tokens, (lengths.get(tokens) ?? 0) + 1));
  }

  #unindex(entry: Entry): void {
    const { digest, chunk, tokens } = entry.object;
    const same = this.#byDigest.get(digest);
    if (same?.delete(entry) !== true) return;
    if (same.size === 0) this.#byDigest.delete(digest);
    const lengths = this.#lengths.get(chunk);
    const left = (lengths?.get(tokens) ?? 1) - 1;
    if (left > 0) lengths?.set(tokens, left);
    else lengths?.delete(tokens);
    if (lengths?.size === 0) this.#lengths.delete(chunk);
  }

  #pinsOf(server: string): PinnedBlocks {
    let pins = this.#servers.get(server);
    if (pins === undefined) {
      pins = new PinnedBlocks();
      this.#servers.set(server, pins);
    }
    return pins;
  }
}

function keyOf({ engineId, requestId }: KvObject): string {
  return `${engineId}\n${requestId}`;
}

/** What is pinned at one D, by the state of its objects. */
class PinnedBlocks {
  readonly kept = new BlockCounts();
  readonly claimed = new BlockCounts();
  readonly releasing = new BlockCounts();
  budget = 0;

  sum(of: "size" | "objects" | "bytes"): number {
    return this.kept[of] + this.claimed[of] + this.releasing[of];
  }
}

/**
 * Blocks of several objects, which may share some: D's prefix cache gives equal begins the same
 * blocks.
 */
class BlockCounts {
  readonly #counts = new Map<number, number>();
  objects = 0;
  bytes = 0;

  get size(): number {
    return this.#counts.size;
  }

  add({ blocks, bytes = 0 }: KeptObject): void {
    this.objects += 1;
    this.bytes += bytes;
    for (const block of blocks) this.#counts.set(block, (this.#counts.get(block) ?? 0) + 1);
  }

  remove({ blocks, bytes = 0 }: KeptObject): void {
    this.objects -= 1;
    this.bytes -= bytes;
    for (const block of blocks) {
      const left = (this.#counts.get(block) ?? 1) - 1;
      if (left > 0) this.#counts.set(block, left);
      else this.#counts.delete(block);
    }
  }
}
