import { createHash } from "node:crypto";
import type { Instance, KvEventStatus } from "../instances/instance.js";
import type { CachedPrefixes } from "../kv-events/kv-event-subscriber.js";
import { promptIds, writtenIds } from "../request/generation-request.js";
import { LeastLoaded, type Routing, type RoutingContext } from "./routing.js";

/** Options of `prefixAware`. */
export interface PrefixAwareOptions {
  /**
   * The prefixes that instances report. Without it, and for text prompts, the strategy remembers
   * the instances that got each prefix.
   */
  readonly cached?: CachedPrefixes | undefined;
  /**
   * How many more requests in flight than the least loaded instance an instance may have and still
   * be chosen for its cache. @default 8
   */
  readonly maxImbalance?: number | undefined;
  /** Characters of a prompt that make one step of a remembered prefix. @default 256 */
  readonly chunkLength?: number | undefined;
  /** Remembered prefixes, of which the least recently used are dropped. @default 50_000 */
  readonly maxPrefixes?: number | undefined;
}

const MAX_CHUNKS = 256;
/**
 * So few instances that may have the same begin of a prompt cached are all asked for the tokens; of
 * more, only the least loaded.
 */
const ALL_ASKED = 4;
const MAX_ASKED = 16;

/** The part of a prompt that an instance has cached. */
interface FoundPrefix {
  readonly instance: Instance;
  /** By its KV events; undefined where it publishes none, or the prompt is text. */
  readonly tokens: number | undefined;
  readonly characters: number;
}

/** An instance that has a begin of the prompt, and how long it is. */
interface Scored {
  readonly instance: Instance;
  readonly score: number;
}

/**
 * Chooses the instance with the longest part of the prompt in its prefix cache, unless it is much
 * busier than another.
 */
export function prefixAware(options: PrefixAwareOptions = {}): Routing {
  return new PrefixAware(options);
}

class PrefixAware implements Routing {
  readonly name = "prefix-aware";
  readonly #cached: CachedPrefixes | undefined;
  readonly #maxImbalance: number;
  readonly #remembered: RememberedPrefixes;
  readonly #byLoad = new LeastLoaded();
  #known: readonly Instance[] = [];
  /** They did not report when they were last asked: their KV events may not have come yet. */
  readonly #silent = new Set<Instance>();
  /** What the last choice had cached before it: `cachedTokens` follows a choice at once. */
  #last: { readonly context: RoutingContext; readonly found: FoundPrefix } | undefined;

  constructor({ cached, maxImbalance = 8, ...options }: PrefixAwareOptions) {
    this.#cached = cached;
    this.#maxImbalance = maxImbalance;
    this.#remembered = new RememberedPrefixes(options, this.#byLoad);
  }

  choose(candidates: readonly Instance[], context: RoutingContext): Instance | undefined {
    const ids = tokensOf(context);
    const most = this.#byLoad.fewest(candidates) + this.#maxImbalance;
    const reported = ids === undefined ? undefined : this.#findReported(ids, candidates, most);
    // Where all that is chosen reports its cache, what was remembered before says nothing.
    const isReported = this.#remembered.isEmpty || (ids !== undefined && this.#silent.size === 0);
    const sent = isReported ? undefined : this.#remembered.longest(context, candidates, most);
    const best = (sent?.score ?? 0) > (reported?.score ?? 0) ? sent : reported;
    if (best !== undefined) this.#byLoad.chosen(best.instance);
    const chosen = best?.instance ?? this.#byLoad.choose(candidates);
    if (chosen === undefined) return undefined;

    if (best !== undefined && best === reported) {
      this.#silent.delete(chosen);
      const found = { instance: chosen, tokens: reported.score, characters: 0 };
      this.#last = { context, found };
      return chosen;
    }
    const found = this.#find(chosen, context);
    this.#last = { context, found };
    // What an instance reports need not be remembered.
    if (found.tokens === undefined) this.#remembered.add(context, chosen);
    return chosen;
  }

  cachedTokens(instance: Instance, context: RoutingContext, charactersPerToken: number): number {
    const last = this.#last;
    const isLast = last?.context === context && last.found.instance === instance;
    const found = isLast ? last.found : this.#find(instance, context);
    if (found.tokens !== undefined) return found.tokens;
    // The text of a list of token ids has no fixed number of characters per token.
    const ids = context.request && writtenIds(context.request)?.slice(0, 1000);
    const perToken = ids === undefined ? charactersPerToken : `[${ids.join()}]`.length / ids.length;
    return Math.floor(found.characters / perToken);
  }

  instancesChanged(instances: readonly Instance[]): void {
    const left = new Set(instances);
    const gone = this.#known.filter((instance) => !left.has(instance));
    this.#known = instances;
    for (const instance of gone) this.#silent.delete(instance);
    if (gone.length > 0) this.#remembered.forget(gone);
    this.#cached?.follow(instances);
  }

  loadChanged(instance: Instance): void {
    this.#byLoad.loadChanged(instance);
  }

  readsTokenIds(): boolean {
    return this.#cached?.readsTokenIds === true;
  }

  kvEvents(instance: Instance): KvEventStatus | null {
    return this.#cached?.status?.(instance) ?? null;
  }

  close(): void {
    this.#cached?.close();
  }

  /** The least loaded of those that report to have the longest begin of the prompt. */
  #findReported(
    ids: ArrayLike<number>,
    candidates: readonly Instance[],
    most: number,
  ): Scored | undefined {
    const cached = this.#cached;
    if (cached === undefined) return undefined;
    let best: Scored | undefined;
    const ask = (instance: Instance) => {
      const score = cached.matchedTokens(instance, ids) ?? 0;
      if (score > (best?.score ?? 0)) best = { instance, score };
    };
    if (cached.holders === undefined) {
      for (const one of this.#byLoad.inOrder(candidates)) {
        if (one.inFlight > most) break;
        ask(one);
      }
      return best;
    }
    let asked = 0;
    for (const { instances, tokens } of cached.holders(ids)) {
      if ((best?.score ?? 0) >= tokens || asked >= MAX_ASKED) break;
      const count = instances.size <= ALL_ASKED ? ALL_ASKED : 1;
      const found = this.#byLoad.holders(candidates, instances, most, count);
      for (const one of found) ask(one);
      asked += found.length;
    }
    return best;
  }

  #find(instance: Instance, context: RoutingContext): FoundPrefix {
    const ids = tokensOf(context);
    const tokens = ids === undefined ? undefined : this.#cached?.matchedTokens(instance, ids);
    if (tokens !== undefined) this.#silent.delete(instance);
    else if (ids !== undefined) this.#silent.add(instance);
    const characters = tokens === undefined ? this.#remembered.characters(context, instance) : 0;
    return { instance, tokens, characters };
  }
}

/** Which instances got which prefixes before. */
class RememberedPrefixes {
  readonly #byLoad: LeastLoaded;
  readonly #chunkLength: number;
  readonly #max: number;
  /** By prefix, in the order of their last use. */
  readonly #holders = new Map<string, Set<Instance>>();
  /** By the fields of a request, which all copies of a prompt share. */
  readonly #keys = new WeakMap<object, readonly string[]>();

  constructor(
    { chunkLength = 256, maxPrefixes = 50_000 }: PrefixAwareOptions,
    byLoad: LeastLoaded,
  ) {
    this.#byLoad = byLoad;
    this.#chunkLength = chunkLength;
    this.#max = maxPrefixes;
  }

  get isEmpty(): boolean {
    return this.#holders.size === 0;
  }

  characters(context: RoutingContext, instance: Instance): number {
    const keys = this.#keysOf(context);
    const missing = keys.findIndex((key) => this.#holders.get(key)?.has(instance) !== true);
    return (missing === -1 ? keys.length : missing) * this.#chunkLength;
  }

  /** The least loaded of those that got the longest begin of the prompt. */
  longest(
    context: RoutingContext,
    candidates: readonly Instance[],
    most: number,
  ): Scored | undefined {
    const keys = this.#keysOf(context);
    let size = 0;
    for (let count = keys.length; count > 0; count -= 1) {
      const holders = this.#holders.get(keys[count - 1] ?? "");
      // As many as got a longer one: these are the same.
      if (holders === undefined || holders.size === size) continue;
      size = holders.size;
      const [instance] = this.#byLoad.holders(candidates, holders, most, 1);
      if (instance !== undefined) return { instance, score: count * this.#chunkLength };
    }
    return undefined;
  }

  add(context: RoutingContext, chosen: Instance): void {
    const all = this.#holders;
    for (const key of this.#keysOf(context)) {
      const holders = all.get(key) ?? new Set();
      all.delete(key);
      all.set(key, holders.add(chosen));
    }
    if (all.size <= this.#max) return;
    // Some at once: a search for the first key passes those that were deleted before it.
    for (const key of all.keys()) {
      if (all.size <= 0.9 * this.#max) break;
      all.delete(key);
    }
  }

  forget(gone: readonly Instance[]): void {
    for (const [key, holders] of this.#holders) {
      for (const instance of gone) holders.delete(instance);
      if (holders.size === 0) this.#holders.delete(key);
    }
  }

  #keysOf({ request }: RoutingContext): readonly string[] {
    if (request === undefined) return [];
    let keys = this.#keys.get(request.fields);
    if (keys === undefined) {
      keys = prefixKeys(request.fields, this.#chunkLength);
      this.#keys.set(request.fields, keys);
    }
    return keys;
  }
}

/**
 * Undefined also for a prompt with a salt: its blocks have hashes of their own, which the index
 * leaves out.
 */
function tokensOf({ request }: RoutingContext): ArrayLike<number> | undefined {
  if (request === undefined || request.fields.cache_salt != null) return undefined;
  return promptIds(request);
}

/**
 * The begin of a value as JSON, at least `length` characters where it has them: a prompt of many
 * megabytes is not written anew to see its begin.
 */
function beginOf(value: unknown, length: number): string {
  if (typeof value === "string") return JSON.stringify(value.slice(0, length));
  if (typeof value !== "object" || value === null) return JSON.stringify(value) ?? "null";
  if (Array.isArray(value) || value instanceof Int32Array) {
    let text = "[";
    // By its position: `for … in` would first list the names of all elements.
    for (let at = 0; at < value.length && text.length < length; at += 1)
      text += `${beginOf(value[at], length - text.length)},`;
    return text;
  }
  let text = "{";
  for (const key in value) {
    if (text.length >= length) break;
    const member = beginOf((value as Readonly<Record<string, unknown>>)[key], length - text.length);
    text += `${JSON.stringify(key.slice(0, length))}:${member},`;
  }
  return text;
}

/**
 * One key for each chunk with all chunks before it. A cache is also keyed by model, salt and tools,
 * so these are hashed first.
 */
function prefixKeys(fields: Readonly<Record<string, unknown>>, chunkLength: number): string[] {
  const { model, prompt, messages, input, instructions, system, tools, cache_salt: salt } = fields;
  const content = prompt ?? messages ?? input;
  const most = MAX_CHUNKS * chunkLength;
  const text = typeof content === "string" ? content : beginOf(content ?? "", most);
  const hash = createHash("sha1").update(beginOf([model, salt, tools, instructions, system], most));
  const keys: string[] = [];
  for (let at = 0; at + chunkLength <= text.length && keys.length < MAX_CHUNKS; at += chunkLength) {
    hash.update(text.slice(at, at + chunkLength));
    keys.push(hash.copy().digest("base64"));
  }
  return keys;
}
