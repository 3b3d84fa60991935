import { setMaxListeners } from "node:events";
import { KvError, type SideChannel } from "@kv/interface";
import { readHandshakeKeys, zmqSideChannel } from "@kv/side-channel";
import { type Instance, type PairingStatus, partOf, type Role } from "../instances/instance.js";
import { needsFactors } from "./check-pair.js";
import {
  type EngineFacts,
  findFactors,
  kvBytesOf,
  mayFindFactors,
  readEngineFacts,
} from "./engine-facts.js";
import { EngineIds } from "./engine-ids.js";
import { fitsAny, fittingKinds, hasEntry, Kinds } from "./kinds.js";
import {
  type AnsweredEngine,
  addressUnknown,
  Entry,
  FIRST_RETRY_MS,
  type Fitting,
  isReady,
  type Kind,
  type PairedInstance,
  type Partner,
  requireAnsweredEngine,
  sameEngine,
} from "./pairing-entry.js";
import type { PairingOptions } from "./pairing-settings.js";
import { logStatus, pairingStatus, refusalText } from "./pairing-status.js";

type HasEngine = "yes" | "no" | "unknown" | "unreadable" | "shared";

/**
 * A handshake of a model with hundreds of layers has some hundred KiB. An engine is asked once a
 * minute.
 */
const READING = { maxReplyFrames: 4, maxReplyBytes: 4 * 2 ** 20, keepsConnections: false };
const MAX_RETRY_MS = 30_000;
/** Between two readings because of what an instance does. */
const MIN_INTERVAL_MS = 500;

/**
 * Knows which prefill instances fit which decode instances: it reads the side channel of each
 * instance when it is added, when its engine may have been restarted, and at a long interval. What
 * an instance sends is limited in time and size.
 */
export class Pairing {
  readonly #options: PairingOptions;
  readonly #entries: Record<Role, Map<Instance, Entry>> = { prefill: new Map(), decode: new Map() };
  readonly #closing = new AbortController();
  #isCurrent = true;
  readonly #toCheck = new Set<Entry>();
  readonly #toReport = new Set<Entry>();
  readonly #kinds: Kinds;
  readonly #engineIds = new EngineIds();
  readonly #sideChannel: SideChannel;
  /**
   * By a list that is the same at each request, and by the kinds that fit: those of the list that
   * do, until an instance changes.
   */
  #fitting = new WeakMap<readonly PairedInstance[], Map<string, Fitting>>();

  /**
   * Reads nothing of instances until pools have some.
   *
   * @throws `KV_CONFIG_INVALID` for a key file that cannot be used.
   */
  constructor(options: PairingOptions) {
    this.#options = options;
    this.#kinds = new Kinds(options.mode);
    const { clock, log, handshakeKeyFile } = options;
    const handshakeKeys = readHandshakeKeys("pairing.handshakeKeyFile", handshakeKeyFile);
    this.#sideChannel = zmqSideChannel({ clock, log, ...READING, handshakeKeys });
    // Each reading listens, and all instances are read at the start.
    setMaxListeners(0, this.#closing.signal);
  }

  instancesChanged(role: Role, instances: readonly PairedInstance[]): void {
    const entries = this.#entries[role];
    const left = new Set<Instance>(instances);
    for (const [instance, entry] of entries) {
      if (left.has(instance)) continue;
      entries.delete(instance);
      entry.timer?.cancel();
      this.#toCheck.delete(entry);
      this.#toReport.delete(entry);
      for (const other of this.#kinds.leave(entry)) this.#toReport.add(other);
      for (const other of this.#engineIds.note(entry, undefined)) this.#toCheck.add(other);
    }
    for (const instance of instances) {
      if (entries.has(instance)) continue;
      const entry = new Entry(instance);
      this.#engineIds.came(entry);
      entries.set(instance, entry);
      this.#toCheck.add(entry);
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

  /**
   * Called when a server has closed a connection that was kept, as it does when it ends. `origin`
   * is that of its URL.
   */
  closed(origin: string): void {
    for (const entry of this.#all()) if (entry.origin === origin) this.#suspect(entry);
  }

  alive(instance: Instance): void {
    const entry = this.#entryOf(instance);
    if (entry?.stale !== true || entry.reading !== undefined) return;
    if (this.#options.clock.now() - entry.readAtMs >= MIN_INTERVAL_MS) void this.#read(entry);
  }

  /**
   * Records the engine that an answer of a prefill instance names. Where it is another one than was
   * read, it is read again, and the promise resolves when that has ended; undefined where nothing
   * is to be waited for.
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
   * For a decode leg with the KV of a prefill instance: where it is not known which engines all
   * decode instances have that fitted it, they are read. Resolves when that has ended; undefined
   * where nothing is to be waited for.
   */
  certain(prefill: Instance): Promise<unknown> | undefined {
    this.#update();
    const kind = this.#entryOf(prefill)?.kind;
    const fitting: Entry[] = [];
    for (const { entries } of fittingKinds(kind)) {
      for (const entry of entries) {
        if (entry.instance.draining) continue;
        if (!entry.isUnsure) return undefined;
        fitting.push(entry);
      }
    }
    // One that does not even refuse connections would hold up each request.
    const readable = fitting.filter(({ error }) => error?.code !== "KV_SIDE_CHANNEL_TIMEOUT");
    return readable.length === 0
      ? undefined
      : Promise.all(readable.map((entry) => this.#read(entry)));
  }

  /**
   * Whether an instance still has the engine `engineId`. Where it may have been restarted, its side
   * channel is read first. `unknown`: it was never read; `unreadable`: it is not readable now;
   * `shared`: another instance has the same id, and peers may read its blocks instead.
   */
  async hasEngine(instance: Instance, engineId: string): Promise<HasEngine> {
    const entry = this.#entryOf(instance);
    if (entry?.facts === undefined) return "unknown";
    if (entry.stale) await this.#read(entry);
    if (entry.stale) return "unreadable";
    this.#update();
    if (!sameEngine(entry.facts.engineId, engineId)) return "no";
    return entry.namesake === undefined ? "yes" : "shared";
  }

  async settled(): Promise<void> {
    for (;;) {
      const readings = this.#all().flatMap(({ reading }) =>
        reading === undefined ? [] : [reading],
      );
      if (readings.length === 0) return;
      await Promise.all(readings);
    }
  }

  /**
   * Those of `instances` that may serve with `partner`, in groups: a later group is for requests
   * that no instance of the groups before it takes.
   */
  *choices<T extends PairedInstance>(
    instances: readonly T[],
    partner: Partner,
  ): Generator<readonly T[]> {
    this.#update();
    if (!("avoiding" in partner)) {
      const kind = this.#entryOf(partner)?.kind;
      const { sure, all } = this.#ofKinds(instances, fittingKinds(kind));
      yield sure;
      yield all;
      return;
    }
    const [first] = instances;
    if (first === undefined) return;
    const kinds = this.#kinds.of(first.role);
    const withPartner = (accepts: (other: Entry) => boolean) =>
      this.#ofKinds(
        instances,
        kinds.filter((kind) => fitsAny(kind, accepts)),
      );
    yield withPartner((other) => isReady(other) && !partner.avoiding.has(other.instance)).sure;
    yield withPartner(({ instance }) => !instance.draining).all;
  }

  /**
   * Whether two instances of different roles fit, as far as neither may have been restarted since
   * it was read.
   */
  fits(one: Instance, other: Instance): boolean {
    this.#update();
    const [own, partner] = [this.#entryOf(one), this.#entryOf(other)];
    if (own?.kind === undefined || partner?.kind === undefined || own.isUnsure || partner.isUnsure)
      return false;
    return own.kind.checks.get(partner.kind)?.fits === true;
  }

  hasPair(): boolean {
    return this.#hasPair(({ instance }) => instance.available());
  }

  /** Whether a prefill instance besides `instance` has an available partner. */
  hasOther(instance: Instance): boolean {
    return this.#hasPair((entry) => entry.instance !== instance && isReady(entry));
  }

  /** Why no instance of `role`, or none of `among`, fits `partner`; undefined where one does. */
  refusal(role: Role, partner: Partner, among?: readonly Instance[]): string | undefined {
    this.#update();
    const isAmong = ({ instance }: Entry) =>
      !instance.draining && (among?.includes(instance) ?? true);
    const isPartner = ({ instance }: Entry) =>
      !instance.draining && ("avoiding" in partner || instance === partner);
    return refusalText(this.#kinds.of(role), isAmong, isPartner);
  }

  /**
   * Bytes of KV in the blocks that an answer of a prefill instance names (`remote_block_ids`), on
   * all of its ranks; undefined where they are not known.
   */
  kvBytes(instance: Instance, blockIds: unknown): number | undefined {
    const facts = this.#entryOf(instance)?.facts;
    return facts === undefined ? undefined : kvBytesOf(facts, blockIds);
  }

  status(instance: Instance): PairingStatus | null {
    this.#update();
    const entry = this.#entryOf(instance);
    return entry?.kind === undefined ? null : pairingStatus(entry, entry.kind);
  }

  close(): void {
    this.#closing.abort(new KvError("KV_REQUEST_ABORTED", "pairing was closed"));
    void this.#sideChannel.close();
    for (const entry of this.#all()) entry.timer?.cancel();
  }

  [Symbol.dispose](): void {
    this.close();
  }

  #all(): Entry[] {
    return [...this.#entries.prefill.values(), ...this.#entries.decode.values()];
  }

  #entryOf(instance: Instance): Entry | undefined {
    return this.#entries[instance.role].get(instance);
  }

  #hasPair(is: (entry: Entry) => boolean): boolean {
    this.#update();
    return this.#kinds.of("prefill").some((kind) => hasEntry(kind, is) && fitsAny(kind, is));
  }

  #ofKinds<T extends PairedInstance>(instances: readonly T[], kinds: readonly Kind[]): Fitting<T> {
    let known = this.#fitting.get(instances);
    if (known === undefined) {
      known = new Map();
      this.#fitting.set(instances, known);
    }
    const key = kinds.map(({ id }) => id).join();
    const found = known.get(key) as Fitting<T> | undefined;
    if (found !== undefined) return found;
    const ofKind = new Set<Kind | undefined>(kinds);
    const isSure = (instance: T) => this.#entryOf(instance)?.isUnsure !== true;
    const all = partOf(instances, (instance) => ofKind.has(this.#entryOf(instance)?.kind));
    const fitting = { all, sure: partOf(all, isSure) };
    known.set(key, fitting);
    return fitting;
  }

  #suspect(entry: Entry): void {
    if (entry.facts === undefined || entry.stale) return;
    entry.stale = true;
    this.#changed();
    this.#readLater(
      entry,
      Math.max(0, entry.readAtMs + MIN_INTERVAL_MS - this.#options.clock.now()),
    );
  }

  #read(entry: Entry): Promise<void> {
    // From now on it is unsure.
    if (entry.facts === undefined) this.#changed();
    entry.reading ??= this.#readOnce(entry).finally(() => {
      entry.reading = undefined;
      this.#toReport.add(entry);
      this.#changed();
    });
    return entry.reading;
  }

  async #readOnce(entry: Entry): Promise<void> {
    const { clock, timeoutMs, get, refreshMs } = this.#options;
    const sideChannel = this.#sideChannel;
    const { instance, address } = entry;
    if (address === undefined || this.#closing.signal.aborted) return;
    entry.timer?.cancel();
    entry.readAtMs = clock.now();
    try {
      const signal = this.#closing.signal;
      const facts = await readEngineFacts({
        instance,
        address,
        sideChannel,
        get,
        timeoutMs,
        signal,
      });
      requireAnsweredEngine(entry, facts, address);
      entry.error = undefined;
      entry.delayMs = FIRST_RETRY_MS;
      this.#adopt(entry, facts);
      this.#readLater(entry, refreshMs);
    } catch (thrown) {
      if (this.#closing.signal.aborted) return;
      entry.error = KvError.from(
        thrown,
        "KV_WIRE_MALFORMED",
        "the side channel's answer cannot be read",
      );
      this.#readLater(entry, entry.delayMs);
      entry.delayMs = Math.min(2 * entry.delayMs, MAX_RETRY_MS);
    }
  }

  #readLater(entry: Entry, delayMs: number): void {
    if (this.#closing.signal.aborted || this.#entryOf(entry.instance) !== entry) return;
    entry.timer?.cancel();
    entry.timer = this.#options.clock.setTimer(() => void this.#read(entry), delayMs);
  }

  #adopt(entry: Entry, facts: EngineFacts): void {
    entry.adopt(facts);
    this.#changed(entry);
  }

  /** `entry`: one that may fit others than before. */
  #changed(entry?: Entry): void {
    if (entry !== undefined) this.#toCheck.add(entry);
    if (this.#isCurrent) queueMicrotask(() => this.#update());
    this.#isCurrent = false;
  }

  #update(): void {
    if (this.#isCurrent) return;
    this.#isCurrent = true;
    this.#fitting = new WeakMap();
    for (const entry of this.#toCheck) this.#check(entry);
    this.#toCheck.clear();
    // What is still being read may fit.
    if (this.#all().some(({ facts, reading }) => facts === undefined && reading !== undefined))
      return;
    for (const entry of this.#toReport)
      if (this.#entryOf(entry.instance) === entry) logStatus(this.#options.log, entry);
    this.#toReport.clear();
  }

  #check(entry: Entry): void {
    if (this.#entryOf(entry.instance) !== entry) return;
    this.#toReport.add(entry);
    for (const one of [...this.#engineIds.note(entry, entry.facts), entry]) {
      this.#toReport.add(one);
      for (const other of this.#kinds.place(one)) this.#toCheck.add(other);
    }
    const { facts, kind } = entry;
    if (facts === undefined || kind === undefined || !mayFindFactors(facts)) return;
    for (const { entries } of kind.checks.keys()) {
      const [other] = entries;
      if (other?.facts !== undefined && needsFactors(facts, other.facts))
        void this.#searchFactors(entry);
    }
  }

  async #searchFactors(entry: Entry): Promise<void> {
    const { facts } = entry;
    const { signal } = this.#closing;
    if (facts === undefined || entry.searching || signal.aborted || !mayFindFactors(facts)) return;
    entry.searching = true;
    try {
      const found = await findFactors(facts, signal);
      if (found === undefined || entry.facts !== facts) return;
      entry.facts = found;
      entry.engines.set(facts.engineId, found);
    } finally {
      entry.searching = false;
      this.#changed(entry);
    }
  }
}
