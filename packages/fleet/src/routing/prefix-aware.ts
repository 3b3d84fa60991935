import { createHash } from "node:crypto";
import type { Instance, KvEventStatus } from "../instances/instance.js";
import { getOrAdd } from "../instances/pooled-instance.js";
import type { CachedPrefixes } from "../kv-events/kv-event-subscriber.js";
import { unsaltedIds, writtenIds } from "../request/generation-request.js";
import { LeastLoaded, type Routing, type RoutingContext } from "./routing.js";

/** Options of `prefixAware`. */
export interface PrefixAwareOptions {
  /**
   * The prefixes that instances report. Without it, and for text prompts, the strategy remembers
   * where it sent each prefix.
   */
  readonly cached?: CachedPrefixes | undefined;
  /**
   * How many more requests in flight than the least loaded instance a cached choice may have.
   * @default 8
   */
  readonly maxImbalance?: number | undefined;
  /** Characters of a prompt per step of a remembered prefix. @default 256 */
  readonly chunkLength?: number | undefined;
  /** Most remembered prefixes; the least recently used are dropped. @default 50_000 */
  readonly maxPrefixes?: number | undefined;
}

const MAX_CHUNKS = 256;
/** Up to this many holders of a prefix are all asked; of more, only the least loaded. */
const ALL_ASKED = 4;
const MAX_ASKED = 16;

interface Scored {
  readonly instance: Instance;
  readonly score: number;
}

/** Chooses the longest cached prefix, unless the instance is much busier than another. */
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
  /** Instances that did not report last time. Their KV events may come later. */
  readonly #silent = new Set<Instance>();
  /** What the last instance had of a prompt before it was chosen for it. */
  #last:
    | {
        readonly context: RoutingContext;
        readonly instance: Instance;
        readonly characters: number;
      }
    | undefined;

  constructor({ cached, maxImbalance = 8, ...options }: PrefixAwareOptions) {
    this.#cached = cached;
    this.#maxImbalance = maxImbalance;
    this.#remembered = new RememberedPrefixes(options, this.#byLoad);
  }

  choose(candidates: readonly Instance[], context: RoutingContext): Instance | undefined {
    const ids = unsaltedIds(context.request);
    const most = this.#byLoad.fewest(candidates) + this.#maxImbalance;
    const reported = ids === undefined ? undefined : this.#findReported(ids, candidates, most);
    // If all candidates report, remembered prefixes say nothing.
    const isReported = this.#remembered.isEmpty || (ids !== undefined && this.#silent.size === 0);
    const sent = isReported ? undefined : this.#remembered.longest(context, candidates, most);
    const best = (sent?.score ?? 0) > (reported?.score ?? 0) ? sent : reported;
    if (best !== undefined) this.#byLoad.chosen(best.instance);
    const instance = best?.instance ?? this.#byLoad.choose(candidates);
    if (instance === undefined) return undefined;

    if (best !== undefined && best === reported) this.#silent.delete(instance);
    else if (this.#reportedTokens(instance, ids) === undefined) {
      const characters = this.#remembered.characters(context, instance);
      this.#last = { context, instance, characters };
      this.#remembered.add(context, instance);
    }
    return instance;
  }

  cachedTokens(instance: Instance, context: RoutingContext, charactersPerToken: number): number {
    const tokens = this.#reportedTokens(instance, unsaltedIds(context.request));
    if (tokens !== undefined) return tokens;
    const last = this.#last;
    const characters =
      last?.context === context && last.instance === instance
        ? last.characters
        : this.#remembered.characters(context, instance);
    // Token ids have no fixed number of characters.
    const ids = context.request && writtenIds(context.request)?.slice(0, 1000);
    const perToken = ids === undefined ? charactersPerToken : `[${ids.join()}]`.length / ids.length;
    return Math.floor(characters / perToken);
  }

  instancesChanged(instances: readonly Instance[]): void {
    const left = new Set(instances);
    const gone = this.#known.filter((instance) => !left.has(instance));
    this.#known = instances;
    this.#byLoad.instancesChanged(instances);
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

  /** Undefined without KV events or token ids. */
  #reportedTokens(instance: Instance, ids: ArrayLike<number> | undefined): number | undefined {
    if (ids === undefined) return undefined;
    const tokens = this.#cached?.matchedTokens(instance, ids);
    if (tokens === undefined) this.#silent.add(instance);
    else this.#silent.delete(instance);
    return tokens;
  }
}

class RememberedPrefixes {
  readonly #chunkLength: number;
  readonly #max: number;
  readonly #holders = new Map<string, Set<Instance>>();
  /** All copies of a prompt share these fields. */
  readonly #keys = new WeakMap<object, readonly string[]>();

  constructor(
    { chunkLength = 256, maxPrefixes = 50_000 }: PrefixAwareOptions,
    private readonly byLoad: LeastLoaded,
  ) {
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

  longest(
    context: RoutingContext,
    candidates: readonly Instance[],
    most: number,
  ): Scored | undefined {
    const keys = this.#keysOf(context);
    let size = 0;
    for (let count = keys.length; count > 0; count -= 1) {
      const holders = this.#holders.get(keys[count - 1] ?? "");
      if (holders === undefined || holders.size === size) continue;
      size = holders.size;
      const [instance] = this.byLoad.holders(candidates, holders, most, 1);
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
    // Many at once, as finding the first key passes all deleted ones.
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
    const { fields } = request;
    return getOrAdd(this.#keys, fields, () => prefixKeys(fields, this.#chunkLength));
  }
}

/** At least `length` characters of a value as JSON, without writing all of it. */
function beginOf(value: unknown, length: number): string {
  if (typeof value === "string") return JSON.stringify(value.slice(0, length));
  if (typeof value !== "object" || value === null) return JSON.stringify(value) ?? "null";
  if (Array.isArray(value) || value instanceof Int32Array) {
    let text = "[";
    // `for … in` would first list all elements.
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

/** One key per prefix of whole chunks. Model, salt and tools also key a cache. */
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
