import { type Clock, KvError, type Log } from "@kv/interface";
import { formatValue, searchHashFactors } from "@kv/protocol";
import { type Instance, instanceName, type PairingStatus, type Role } from "../instances/instance.js";
import { checkPair, differenceIsKnown, type PairCheck, type PairDifference } from "./check-pair.js";
import { type EngineFacts, type InstanceGet, modeIn, readEngineFacts } from "./engine-facts.js";
import {
  type AnsweredEngine,
  addressUnknown,
  Entry,
  FIRST_RETRY_MS,
  isReady,
  nearest,
  type PairedInstance,
  requireAnsweredEngine,
  sameEngine,
} from "./pairing-entry.js";
import { hasMla } from "./plan-pair.js";

/**
 * What pairs with an instance whose side channel was never read, because its address is not known or it cannot be reached. `lenient`: every
 * instance, as without pairing; it is logged. `label`: instances with its label. `strict`: none. With `off`, no side channel is read
 * and all instances pair.
 */
export const PAIRING_MODES = ["lenient", "label", "strict", "off"] as const;
/** One of `PAIRING_MODES`. */
export type PairingMode = (typeof PAIRING_MODES)[number];

/** How instances are paired. */
export interface PairingSettings {
  /** What pairs with an instance whose side channel cannot be read. */
  readonly mode: Exclude<PairingMode, "off">;
  /** Time limit of one reading of a side channel, in milliseconds. */
  readonly timeoutMs: number;
  /** Between two readings of an engine that shows no sign of a restart, in milliseconds. */
  readonly refreshMs: number;
}

/** What `Pairing` gets from its user. */
export interface PairingOptions extends PairingSettings {
  /** Sends a GET to an instance. */
  readonly get: InstanceGet;
  /** Times readings. */
  readonly clock: Clock;
  /** Gets one line when an instance finds no partner any more, or is paired unread. */
  readonly log: Log;
}

/** The prefill instance that a decode instance is to fit; for a prefill instance, that there is to be any decode instance that it fits. */
export type Partner = Instance | AnyPartner;

/** Any decode instance that takes requests. */
export interface AnyPartner {
  /** Decode instances that count only where there is no other. */
  readonly avoiding: ReadonlySet<Instance>;
}

const MAX_RETRY_MS = 30_000;
/** Between two readings because of what an instance does. */
const MIN_INTERVAL_MS = 500;
/** Engines that answer under one URL, such as the ranks of a data-parallel server. */
const MAX_ENGINES = 16;

/**
 * Knows which prefill instances fit which decode instances: it reads the side channel of each instance when it is added, when its engine may have
 * been restarted, and at a long interval. What an instance sends is limited in time and size.
 */
export class Pairing {
  readonly #options: PairingOptions;
  readonly #entries: Record<Role, Map<Instance, Entry>> = { prefill: new Map(), decode: new Map() };
  readonly #closing = new AbortController();
  #isCurrent = true;
  /** Every instance fits every one of the other role, and all are verified or never were. */
  #allFit = true;

  /** Reads nothing until pools have instances. */
  constructor(options: PairingOptions) {
    this.#options = options;
  }

  /** Called by pools with all instances of a role after each change. */
  instancesChanged(role: Role, instances: readonly PairedInstance[]): void {
    const entries = this.#entries[role];
    const left = new Set<Instance>(instances);
    for (const [instance, entry] of entries) {
      if (left.has(instance)) continue;
      entries.delete(instance);
      entry.timer?.cancel();
    }
    for (const instance of instances) {
      if (entries.has(instance)) continue;
      const entry = new Entry(instance);
      entries.set(instance, entry);
      if (entry.address === undefined) entry.error = addressUnknown(role);
      else void this.#read(entry);
    }
    this.#changed();
  }

  /** Called by pools when an instance failed: its engine may be another one when it is back. */
  failed(instance: Instance): void {
    const entry = this.#entryOf(instance);
    if (entry !== undefined) this.#suspect(entry);
  }

  /** Called when a server has closed a connection that was kept, as it does when it ends. `origin` is that of its URL. */
  closed(origin: string): void {
    for (const entry of this.#all()) if (entry.origin === origin) this.#suspect(entry);
  }

  /** Called by pools when an instance has answered. */
  alive(instance: Instance): void {
    const entry = this.#entryOf(instance);
    if (entry?.stale !== true || entry.reading !== undefined) return;
    if (this.#options.clock.now() - entry.readAtMs >= MIN_INTERVAL_MS) void this.#read(entry);
  }

  /**
   * Records the engine that an answer of a prefill instance names. Where it is another one than was read, it is read again, and the promise resolves
   * when that has ended; undefined where nothing is to be waited for.
   */
  answered(instance: Instance, engine: AnsweredEngine): Promise<void> | undefined {
    const entry = this.#entryOf(instance);
    if (entry === undefined) return undefined;
    const { facts } = entry;
    entry.answered = engine;
    if (facts !== undefined && sameEngine(facts.engineId, engine.engineId)) {
      if (facts.tpSize === undefined || facts.mode === undefined) this.#adopt(entry, facts);
      return undefined;
    }
    const known = entry.engines.get(engine.engineId);
    if (known !== undefined) {
      this.#adopt(entry, known);
      return undefined;
    }
    if (facts === undefined) {
      if (this.#options.clock.now() - entry.readAtMs >= entry.delayMs) void this.#read(entry);
      return undefined;
    }
    entry.stale = true;
    this.#changed();
    // A side channel that was just not to be read would hold up each request.
    const hasFailed = entry.error !== undefined && entry.reading === undefined;
    if (hasFailed && this.#options.clock.now() - entry.readAtMs < entry.delayMs) return undefined;
    return this.#read(entry);
  }

  /**
   * For a decode leg with the KV of a prefill instance: where it is not known which engines all decode instances have that fitted it, they are read.
   * Resolves when that has ended; undefined where nothing is to be waited for.
   */
  certain(prefill: Instance): Promise<unknown> | undefined {
    this.#update();
    const checks = this.#allFit ? undefined : this.#entryOf(prefill)?.checks;
    const fitting = [...(checks ?? [])].flatMap(([other, { fits }]) =>
      fits && !other.instance.draining ? [other] : [],
    );
    if (fitting.some(({ isUnsure }) => !isUnsure)) return undefined;
    // One that does not even refuse connections would hold up each request.
    const readable = fitting.filter(({ error }) => error?.code !== "KV_SIDE_CHANNEL_TIMEOUT");
    return readable.length === 0 ? undefined : Promise.all(readable.map((entry) => this.#read(entry)));
  }

  /** Resolves when no side channel is being read. */
  async settled(): Promise<void> {
    for (;;) {
      const readings = this.#all().flatMap(({ reading }) => (reading === undefined ? [] : [reading]));
      if (readings.length === 0) return;
      await Promise.all(readings);
    }
  }

  /**
   * Those of `instances` that may serve with `partner`, in groups: a later group is for requests that no instance of the groups before it takes.
   */
  *choices<T extends PairedInstance>(instances: readonly T[], partner: Partner): Generator<readonly T[]> {
    this.#update();
    const avoiding = "avoiding" in partner ? partner.avoiding : undefined;
    if (this.#allFit && (avoiding === undefined || avoiding.size === 0)) {
      yield instances;
      return;
    }
    if (avoiding === undefined) {
      const own = this.#entryOf(partner as Instance)?.checks;
      const fitting = instances.filter((instance) => {
        const entry = this.#entryOf(instance);
        return entry !== undefined && own?.get(entry)?.fits === true;
      });
      yield fitting.filter((instance) => this.#entryOf(instance)?.isUnsure !== true);
      yield fitting;
      return;
    }
    yield instances.filter(
      (instance) =>
        this.#entryOf(instance)?.isUnsure !== true &&
        this.#hasPartner(instance, (other) => isReady(other) && !avoiding.has(other.instance)),
    );
    yield instances.filter((instance) => this.#hasPartner(instance, () => true));
  }

  /** Whether a prefill and a decode instance that fit are available. */
  hasPair(): boolean {
    this.#update();
    return [...this.#entries.prefill.values()].some(
      ({ instance }) =>
        instance.available() && this.#hasPartner(instance, (other) => other.instance.available()),
    );
  }

  /** Whether a prefill instance besides `instance` has an available partner. */
  hasOther(instance: Instance): boolean {
    this.#update();
    return [...this.#entries.prefill.values()].some(
      (entry) => entry.instance !== instance && isReady(entry) && this.#hasPartner(entry.instance, isReady),
    );
  }

  /** Why no instance of `role` fits `partner`; undefined where one does. */
  refusal(role: Role, partner: Partner): string | undefined {
    this.#update();
    const entries = [...this.#entries[role].values()].filter(({ instance }) => !instance.draining);
    const texts = new Set<string>();
    for (const entry of entries) {
      for (const [other, check] of entry.checks) {
        if (other.instance.draining) continue;
        if (!("avoiding" in partner) && other.instance !== partner) continue;
        if (check.fits) return undefined;
        texts.add(textOf(check));
      }
    }
    if (texts.size === 0) return undefined;
    return (
      [...texts].slice(0, 3).join(", or ") + (texts.size > 3 ? `, and ${texts.size - 3} more reasons` : "")
    );
  }

  /**
   * Bytes of KV in the blocks that an answer of a prefill instance names (`remote_block_ids`), on all of its ranks; undefined where they are not known.
   */
  kvBytes(instance: Instance, blockIds: unknown): number | undefined {
    const facts = this.#entryOf(instance)?.facts;
    if (facts === undefined || !Array.isArray(blockIds)) return undefined;
    const groups = Array.isArray(blockIds[0]) ? (blockIds as unknown[]) : [blockIds];
    const counts = groups.map((ids) => (Array.isArray(ids) ? ids.length : 0));
    const all = counts.reduce((sum, count) => sum + count, 0);
    const { blockLengthsBytes, regionGroupIds, physicalBlocksPerLogical } = facts.metadata;
    let bytes = 0;
    for (const [region, lengthBytes] of blockLengthsBytes.entries())
      bytes += lengthBytes * (counts[regionGroupIds?.[region] ?? 0] ?? all);
    // Of MLA each rank holds the same.
    const ranks = hasMla(facts.metadata) ? 1 : (facts.tpSize ?? 1);
    return bytes * physicalBlocksPerLogical * ranks;
  }

  /** How an instance is paired. */
  status(instance: Instance): PairingStatus | null {
    this.#update();
    const entry = this.#entryOf(instance);
    if (entry === undefined) return null;
    const { facts, error, address, stale } = entry;
    const fits = [...entry.checks.values()].filter((check) => check.fits);
    const near = nearest(entry);
    const unverified = facts === undefined && fits.length > 0;
    const state =
      entry.checks.size === 0
        ? "alone"
        : fits.length === 0
          ? "unpaired"
          : unverified
            ? "unverified"
            : "paired";
    const reason =
      near !== undefined
        ? textOf(near) + (facts === undefined && error !== undefined ? ` (${error.message})` : "")
        : unverified
          ? (error?.message ?? "its side channel is being read")
          : (fits.find((check) => check.note !== undefined)?.note ?? null);
    return {
      state,
      partners: fits.length,
      reason,
      differences: (near?.differences ?? []).map(({ factor, prefill, decode }) => ({
        factor,
        prefill: shown(prefill),
        decode: shown(decode),
      })),
      side_channel: address === undefined ? null : `${address.host}:${address.port}`,
      engine_id: facts?.engineId ?? null,
      compatibility_hash: facts?.compatibilityHash ?? null,
      vllm_version: facts?.vllmVersion ?? null,
      tp_size: facts?.tpSize ?? null,
      block_size: facts?.metadata.blockSize ?? null,
      kv_cache_layout: facts?.metadata.kvCacheLayout ?? null,
      transfer_mode: facts?.mode ?? null,
      stale,
    };
  }

  /** Ends all readings. */
  close(): void {
    this.#closing.abort(new KvError("KV_REQUEST_ABORTED", "pairing was closed"));
    for (const entry of this.#all()) entry.timer?.cancel();
  }

  /** As `close`. */
  [Symbol.dispose](): void {
    this.close();
  }

  #all(): Entry[] {
    return [...this.#entries.prefill.values(), ...this.#entries.decode.values()];
  }

  #entryOf(instance: Instance): Entry | undefined {
    return this.#entries[instance.role].get(instance);
  }

  #hasPartner(instance: Instance, accepts: (other: Entry) => boolean): boolean {
    const entry = this.#entryOf(instance);
    if (entry === undefined) return false;
    for (const [other, check] of entry.checks)
      if (check.fits && !other.instance.draining && accepts(other)) return true;
    return false;
  }

  #suspect(entry: Entry): void {
    if (entry.facts === undefined || entry.stale) return;
    entry.stale = true;
    this.#changed();
    this.#readLater(entry, Math.max(0, entry.readAtMs + MIN_INTERVAL_MS - this.#options.clock.now()));
  }

  #read(entry: Entry): Promise<void> {
    entry.reading ??= this.#readOnce(entry).finally(() => {
      entry.reading = undefined;
      this.#changed();
    });
    return entry.reading;
  }

  async #readOnce(entry: Entry): Promise<void> {
    const { clock, timeoutMs, get, refreshMs } = this.#options;
    const { instance, address } = entry;
    if (address === undefined || this.#closing.signal.aborted) return;
    entry.timer?.cancel();
    entry.readAtMs = clock.now();
    try {
      const signal = this.#closing.signal;
      const facts = await readEngineFacts({ instance, address, get, clock, timeoutMs, signal });
      requireAnsweredEngine(entry, facts, address);
      entry.error = undefined;
      entry.delayMs = FIRST_RETRY_MS;
      this.#adopt(entry, facts);
      this.#readLater(entry, refreshMs);
    } catch (thrown) {
      if (this.#closing.signal.aborted) return;
      entry.error = KvError.from(thrown, "KV_WIRE_MALFORMED", "the side channel's answer cannot be read");
      this.#readLater(entry, entry.delayMs);
      entry.delayMs = Math.min(2 * entry.delayMs, MAX_RETRY_MS);
    }
  }

  #readLater(entry: Entry, delayMs: number): void {
    if (this.#closing.signal.aborted || this.#entryOf(entry.instance) !== entry) return;
    entry.timer?.cancel();
    entry.timer = this.#options.clock.setTimer(() => void this.#read(entry), delayMs);
  }

  /** Takes the facts as those of the instance, with what its configuration and its answers add. */
  #adopt(entry: Entry, facts: EngineFacts): void {
    const { answered, instance } = entry;
    const own =
      answered !== undefined && sameEngine(answered.engineId, facts.engineId) ? answered : undefined;
    const before = entry.engines.get(facts.engineId);
    const isSame = before?.compatibilityHash === facts.compatibilityHash;
    const factors = facts.factors ?? (isSame ? before?.factors : undefined);
    entry.facts = {
      ...facts,
      factors,
      tpSize: instance.kv?.tpSize ?? own?.tpSize ?? facts.tpSize,
      mode: modeIn(factors) ?? own?.mode ?? facts.mode,
    };
    entry.stale = false;
    entry.engines.delete(facts.engineId);
    entry.engines.set(facts.engineId, entry.facts);
    const [oldest] = entry.engines.keys();
    if (entry.engines.size > MAX_ENGINES && oldest !== undefined) entry.engines.delete(oldest);
    this.#changed();
  }

  #changed(): void {
    if (this.#isCurrent) queueMicrotask(() => this.#update());
    this.#isCurrent = false;
  }

  /** Checks all pairs again after a change. Equal pairs are not planned twice. */
  #update(): void {
    if (this.#isCurrent) return;
    this.#isCurrent = true;
    const [prefill, decode] = [[...this.#entries.prefill.values()], [...this.#entries.decode.values()]];
    for (const entry of [...prefill, ...decode]) entry.checks = new Map();
    this.#allFit = true;
    for (const p of prefill) {
      for (const d of decode) {
        const check = this.#check(p, d);
        p.checks.set(d, check);
        d.checks.set(p, check);
        if (!check.fits || p.isUnsure || d.isUnsure) this.#allFit = false;
      }
    }
    const all = [...prefill, ...decode];
    // What is still being read may fit.
    if (all.some(({ facts, reading }) => facts === undefined && reading !== undefined)) return;
    for (const entry of all) this.#report(entry);
  }

  #check(p: Entry, d: Entry): PairCheck {
    if (p.facts !== undefined && d.facts !== undefined) {
      const check = checkFacts(p.facts, d.facts);
      if (
        !check.fits &&
        p.facts.compatibilityHash !== d.facts.compatibilityHash &&
        !differenceIsKnown(p.facts, d.facts)
      )
        for (const entry of [p, d]) void this.#searchFactors(entry);
      return check;
    }
    const [ours, theirs] = [p.instance.label, d.instance.label];
    const { mode } = this.#options;
    if (mode !== "strict" && ours !== undefined && theirs !== undefined) {
      if (ours === theirs) return { fits: true, basis: "label" };
      return { fits: false, differences: [{ factor: "label", prefill: ours, decode: theirs }] };
    }
    if (mode === "lenient") return { fits: true, basis: "unverified" };
    const side = (entry: Entry) => {
      if (entry.facts !== undefined) return "read";
      return mode === "label" && entry.instance.label === undefined
        ? "not read, without a label"
        : "not read";
    };
    return { fits: false, differences: [{ factor: "side_channel", prefill: side(p), decode: side(d) }] };
  }

  /** Finds the factors of a hash in steps, between which requests are served. */
  async #searchFactors(entry: Entry): Promise<void> {
    const { facts } = entry;
    if (facts === undefined || facts.factors !== undefined || entry.searching || searched.has(facts)) return;
    entry.searching = true;
    try {
      const search = searchHashFactors(facts.compatibilityHash, {
        vllmVersion: facts.vllmVersion,
        models: facts.models,
        metadata: facts.metadata,
        tpSize: facts.tpSize ?? 1,
        cacheDtype: undefined,
        transferMode: facts.mode,
        knownFactors: {},
      });
      let step = search.next();
      for (; step.done !== true; step = search.next()) {
        await new Promise((resolve) => setImmediate(resolve));
        if (this.#closing.signal.aborted) return;
      }
      const { factors } = step.value;
      searched.add(facts);
      if (entry.facts === facts && factors !== undefined) {
        const found = { ...facts, factors, mode: modeIn(factors) ?? facts.mode };
        entry.facts = found;
        entry.engines.set(facts.engineId, found);
      }
    } finally {
      entry.searching = false;
      this.#changed();
    }
  }

  /** Logs once what has changed. */
  #report(entry: Entry): void {
    if (entry.searching || entry.reading !== undefined) return;
    const status = this.status(entry.instance);
    if (status === null) return;
    const { state, reason, differences } = status;
    const key = state === "unpaired" || state === "unverified" ? `${state} ${reason}` : state;
    const before = entry.logged;
    if (key === before) return;
    entry.logged = key;
    const { log } = this.#options;
    const fields = { role: entry.instance.role, instance: instanceName(entry.instance), reason };
    if (state === "unpaired") log.warn("instance-unpaired", { ...fields, differences });
    else if (state === "unverified") log.warn("instance-unverified", { ...fields, hint: entry.error?.hint });
    else if (state === "paired" && before !== "")
      log.info("instance-paired", { ...fields, partners: status.partners });
  }
}

/** Facts whose factors were searched for. */
const searched = new WeakSet<EngineFacts>();

function checkFacts(prefill: EngineFacts, decode: EngineFacts): PairCheck {
  try {
    return checkPair(prefill, decode);
  } catch (thrown) {
    const note = thrown instanceof Error ? thrown.message : String(thrown);
    return { fits: false, differences: [{ factor: "plan", prefill: note, decode: note }], note };
  }
}

function textOf({
  differences,
  note,
}: {
  readonly differences: readonly PairDifference[];
  readonly note?: string | undefined;
}) {
  const text = differences
    .slice(0, 4)
    .map(
      ({ factor, prefill, decode }) =>
        `${factor} is ${shown(prefill)} at prefill and ${shown(decode)} at decode`,
    )
    .join("; ");
  return note === undefined ? text : `${text} (${note.slice(0, 300)})`;
}

function shown(value: unknown): string {
  const text = typeof value === "string" ? value.slice(0, 200) : formatValue(value);
  return text;
}
