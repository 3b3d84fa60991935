import { setMaxListeners } from "node:events";
import { KvError, type SideChannel } from "@kv/interface";
import { readHandshakeKeys, zmqSideChannel } from "@kv/side-channel";
import { type Instance, type PairingStatus, partOf, type Role } from "../instances/instance.js";
import { getOrAdd, type PooledInstance } from "../instances/pooled-instance.js";
import { needsFactors } from "./check-pair.js";
import {
  type EngineFacts,
  findFactors,
  kvBytesOf,
  mayFindFactors,
  readEngineFacts,
} from "./engine-facts.js";
import {
  type AnsweredEngine,
  addressUnknown,
  EngineIds,
  Entry,
  FIRST_RETRY_MS,
  type Fitting,
  isReady,
  type Kind,
  Kinds,
  type Partner,
  requireAnsweredEngine,
  sameEngine,
} from "./kinds.js";
import type { PairingOptions } from "./pairing-settings.js";
import { logStatus, pairingStatus, refusalText } from "./pairing-status.js";

/** A handshake of hundreds of layers has some hundred KiB. */
const READING = { maxReplyFrames: 4, maxReplyBytes: 4 * 2 ** 20, keepsConnections: false };
const MAX_RETRY_MS = 30_000;
/** Limits the readings that an instance causes. */
const MIN_INTERVAL_MS = 500;

/**
 * Knows which prefill and decode instances fit. It reads each side channel when the instance is
 * added, after a possible restart, and at a long interval, with limits in time and size.
 */
export class Pairing {
  readonly #entries: Record<Role, Map<Instance, Entry>> = { prefill: new Map(), decode: new Map() };
  readonly #closing = new AbortController();
  #isCurrent = true;
  readonly #toCheck = new Set<Entry>();
  readonly #toReport = new Set<Entry>();
  readonly #kinds: Kinds;
  readonly #engineIds = new EngineIds();
  readonly #sideChannel: SideChannel;
  #fitting = new WeakMap<readonly PooledInstance[], Map<string, Fitting>>();

  /**
   * Reads nothing until pools have instances.
   *
   * @throws `KV_CONFIG_INVALID` for a key file that cannot be used.
   */
  constructor(private readonly options: PairingOptions) {
    this.#kinds = new Kinds(options.mode);
    const { clock, log, handshakeKeyFile } = options;
    const handshakeKeys = readHandshakeKeys("pairing.handshakeKeyFile", handshakeKeyFile);
    this.#sideChannel = zmqSideChannel({ clock, log, ...READING, handshakeKeys });
    // Each reading adds a listener.
    setMaxListeners(0, this.#closing.signal);
  }

  instancesChanged(role: Role, instances: readonly PooledInstance[]): void {
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

  failed(instance: Instance): void {
    const entry = this.#entryOf(instance);
    if (entry !== undefined) this.#suspect(entry);
  }

  /** A server that ends closes its kept connections. */
  closed(origin: string): void {
    for (const entry of this.#all()) if (entry.origin === origin) this.#suspect(entry);
  }

  alive(instance: Instance): void {
    const entry = this.#entryOf(instance);
    if (entry?.stale !== true || entry.reading !== undefined) return;
    if (this.#sinceRead(entry) >= MIN_INTERVAL_MS) void this.#read(entry);
  }

  /**
   * Records the engine that an answer names. The side channel of a new one is read, and the promise
   * resolves after that.
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
    const isDue = this.#sinceRead(entry) >= entry.delayMs;
    if (facts === undefined) {
      if (isDue) void this.#read(entry);
      return undefined;
    }
    entry.stale = true;
    this.#changed();
    // A failing side channel would delay each request.
    const hasFailed = entry.error !== undefined && entry.reading === undefined;
    return hasFailed && !isDue ? undefined : this.#read(entry);
  }

  /**
   * Before a decode leg with a prefill instance's KV, reads fitting decode instances with an
   * unknown engine.
   */
  certain(prefill: Instance): Promise<unknown> | undefined {
    this.#update();
    const kind = this.#entryOf(prefill)?.kind;
    const isSure = ({ instance, isUnsure }: Entry) => !instance.draining && !isUnsure;
    if (kind === undefined || kind.fitsAny(isSure)) return undefined;
    // An instance that only times out would delay each request.
    const readable = kind.fitting
      .flatMap(({ entries }) => [...entries])
      .filter(
        ({ instance, error }) => !instance.draining && error?.code !== "KV_SIDE_CHANNEL_TIMEOUT",
      );
    return readable.length === 0
      ? undefined
      : Promise.all(readable.map((entry) => this.#read(entry)));
  }

  /**
   * Whether an instance still has the engine `engineId`, which is read again after a possible
   * restart. `unknown`: it was never read; `unreadable`: it is not readable now; `shared`: another
   * instance has the id, and peers may read its blocks instead.
   */
  async hasEngine(instance: Instance, engineId: string) {
    const entry = this.#entryOf(instance);
    if (entry?.facts === undefined) return "unknown";
    if (entry.stale) await this.#read(entry);
    if (entry.stale) return "unreadable";
    this.#update();
    if (!sameEngine(entry.facts.engineId, engineId)) return "no";
    return entry.namesake === undefined ? "yes" : "shared";
  }

  async settled(): Promise<void> {
    const isReading = ({ reading }: Entry) => reading !== undefined;
    for (let left = this.#all(); left.some(isReading); left = this.#all())
      await Promise.all(left.map(({ reading }) => reading));
  }

  /**
   * Groups of `instances` that may serve with `partner`. A later group is for requests that no
   * earlier one takes.
   */
  *choices(
    instances: readonly PooledInstance[],
    partner: Partner,
  ): Generator<readonly PooledInstance[]> {
    this.#update();
    if (!("avoiding" in partner)) {
      const kind = this.#entryOf(partner)?.kind;
      const { sure, all } = this.#ofKinds(instances, kind?.fitting ?? []);
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
        kinds.filter((kind) => kind.fitsAny(accepts)),
      );
    yield withPartner((other) => isReady(other) && !partner.avoiding.has(other.instance)).sure;
    yield withPartner(({ instance }) => !instance.draining).all;
  }

  /** False if either may have restarted unread. */
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

  hasOther(instance: Instance): boolean {
    return this.#hasPair((entry) => entry.instance !== instance && isReady(entry));
  }

  refusal(role: Role, partner: Partner, among?: readonly Instance[]): string | undefined {
    this.#update();
    const isAmong = ({ instance }: Entry) =>
      !instance.draining && (among?.includes(instance) ?? true);
    const isPartner = ({ instance }: Entry) =>
      !instance.draining && ("avoiding" in partner || instance === partner);
    return refusalText(this.#kinds.of(role), isAmong, isPartner);
  }

  /** Bytes of `remote_block_ids`; undefined if unknown. */
  kvBytes(instance: Instance, blockIds: unknown): number | undefined {
    const facts = this.#entryOf(instance)?.facts;
    return facts && kvBytesOf(facts, blockIds);
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
    return this.#kinds.of("prefill").some((kind) => kind.has(is) && kind.fitsAny(is));
  }

  #ofKinds(instances: readonly PooledInstance[], kinds: readonly Kind[]): Fitting {
    const known = getOrAdd(this.#fitting, instances, () => new Map<string, Fitting>());
    return getOrAdd(known, kinds.map(({ id }) => id).join(), () => {
      const ofKind = new Set<Kind | undefined>(kinds);
      const all = partOf(instances, (one) => ofKind.has(this.#entryOf(one)?.kind));
      return { all, sure: partOf(all, (one) => this.#entryOf(one)?.isUnsure !== true) };
    });
  }

  #suspect(entry: Entry): void {
    if (entry.facts === undefined || entry.stale) return;
    entry.stale = true;
    this.#changed();
    this.#readLater(entry, Math.max(0, MIN_INTERVAL_MS - this.#sinceRead(entry)));
  }

  #sinceRead({ readAtMs }: Entry): number {
    return this.options.clock.now() - readAtMs;
  }

  #read(entry: Entry): Promise<void> {
    if (entry.facts === undefined) this.#changed();
    entry.reading ??= this.#readOnce(entry).finally(() => {
      entry.reading = undefined;
      this.#toReport.add(entry);
      this.#changed();
    });
    return entry.reading;
  }

  async #readOnce(entry: Entry): Promise<void> {
    const { clock, timeoutMs, get, refreshMs } = this.options;
    const sideChannel = this.#sideChannel;
    const { signal } = this.#closing;
    const { instance, address } = entry;
    if (address === undefined || signal.aborted) return;
    entry.timer?.cancel();
    entry.readAtMs = clock.now();
    try {
      const reading = { instance, address, sideChannel, get, timeoutMs, signal };
      const facts = await readEngineFacts(reading);
      requireAnsweredEngine(entry, facts, address);
      entry.error = undefined;
      entry.delayMs = FIRST_RETRY_MS;
      this.#adopt(entry, facts);
      this.#readLater(entry, refreshMs);
    } catch (thrown) {
      if (signal.aborted) return;
      const what = "the side channel's answer cannot be read";
      entry.error = KvError.from(thrown, "KV_WIRE_MALFORMED", what);
      this.#readLater(entry, entry.delayMs);
      entry.delayMs = Math.min(2 * entry.delayMs, MAX_RETRY_MS);
    }
  }

  #readLater(entry: Entry, delayMs: number): void {
    if (this.#closing.signal.aborted || this.#entryOf(entry.instance) !== entry) return;
    entry.timer?.cancel();
    entry.timer = this.options.clock.setTimer(() => void this.#read(entry), delayMs);
  }

  #adopt(entry: Entry, facts: EngineFacts): void {
    entry.adopt(facts);
    this.#changed(entry);
  }

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
    if (this.#all().some(({ facts, reading }) => facts === undefined && reading !== undefined))
      return;
    for (const entry of this.#toReport)
      if (this.#entryOf(entry.instance) === entry) logStatus(this.options.log, entry);
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
