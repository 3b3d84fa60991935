import { KvError, type Timer } from "@kv/interface";
import { hostOf, type Instance, instanceName, type Role } from "../instances/instance.js";
import { getOrAdd, type PooledInstance, putLast } from "../instances/pooled-instance.js";
import { invalidConfig } from "../settings/invalid-config.js";
import { checkKey, checkPair, fitting, misfit, type PairCheck } from "./check-pair.js";
import { type EngineFacts, modeIn, type SideChannelAddress } from "./engine-facts.js";
import type { PairingSettings } from "./pairing-settings.js";

export const FIRST_RETRY_MS = 1000;
const DEFAULT_PORT = 5600;
const MAX_ENGINES = 16;

/**
 * For a decode instance, the prefill instance that it must fit. A prefill instance must fit at
 * least one decode instance.
 */
export type Partner = Instance | AnyPartner;

/** Any decode instance that takes requests. */
export interface AnyPartner {
  /** They count only if there is no other. */
  readonly avoiding: ReadonlySet<Instance>;
}

/** A prefill instance's engine and side channel, from `kv_transfer_params` of an answer. */
export interface AnsweredEngine {
  readonly engineId: string;
  readonly host: string;
  readonly port: number;
  readonly tpSize: number;
  readonly mode: "pull" | "push";
}

/** Instances of one role that fit the same others. */
export class Kind {
  readonly entries = new Set<Entry>();
  readonly checks = new Map<Kind, PairCheck>();

  constructor(
    readonly key: string,
    readonly id: number,
  ) {}

  get fitting(): Kind[] {
    return [...this.checks].flatMap(([other, { fits }]) => (fits ? [other] : []));
  }

  has(is: (entry: Entry) => boolean): boolean {
    for (const entry of this.entries) if (is(entry)) return true;
    return false;
  }

  fitsAny(is: (entry: Entry) => boolean): boolean {
    return this.fitting.some((other) => other.has(is));
  }
}

export class Entry {
  facts: EngineFacts | undefined;
  /** An instance whose engine has the same id. */
  namesake: Instance | undefined;
  cameAt = 0;
  /** What `EngineIds` knows, and since when. */
  noted: EngineFacts | undefined;
  notedAt = 0;
  readonly engines = new Map<string, EngineFacts>();
  answered: AnsweredEngine | undefined;
  /** The engine may have changed since it was read. */
  stale = false;
  error: KvError | undefined;
  reading: Promise<void> | undefined;
  searching = false;
  timer: Timer | undefined;
  delayMs = FIRST_RETRY_MS;
  readAtMs = Number.NEGATIVE_INFINITY;
  kind: Kind | undefined;
  logged = "";

  readonly origin: string;

  constructor(readonly instance: PooledInstance) {
    this.origin = new URL(instance.url).origin;
  }

  get address(): SideChannelAddress | undefined {
    const { kv, url } = this.instance;
    const host = hostOf(url);
    if (kv !== undefined && (kv.host ?? kv.port ?? kv.engineId) !== undefined)
      return { host: kv.host ?? host, port: kv.port ?? DEFAULT_PORT };
    if (this.answered === undefined) return undefined;
    const { host: announced, port } = this.answered;
    // A loopback name means another host here.
    return { host: isOwnHost(announced) && !isOwnHost(host) ? host : announced, port };
  }

  get isUnsure(): boolean {
    return this.stale || (this.facts === undefined && this.reading !== undefined);
  }

  adopt(facts: EngineFacts): void {
    const { answered, instance, engines } = this;
    const isOwn = answered !== undefined && sameEngine(answered.engineId, facts.engineId);
    const own = isOwn ? answered : undefined;
    const before = engines.get(facts.engineId);
    const isSame = before?.compatibilityHash === facts.compatibilityHash;
    const factors = facts.factors ?? (isSame ? before?.factors : undefined);
    this.facts = {
      ...facts,
      factors,
      tpSize: instance.kv?.tpSize ?? own?.tpSize ?? facts.tpSize,
      mode: modeIn(factors) ?? own?.mode ?? facts.mode,
    };
    this.stale = false;
    putLast(engines, facts.engineId, this.facts, MAX_ENGINES);
  }
}

export function isReady(entry: Entry): boolean {
  return !entry.isUnsure && entry.instance.available();
}

/** Ranks of a data-parallel server share a configuration: `ID_dp0`, `ID_dp1`. */
export function sameEngine(one: string, other: string): boolean {
  return one.replace(/_dp\d+$/, "") === other.replace(/_dp\d+$/, "");
}

function isOwnHost(host: string): boolean {
  return /^(localhost|127\.\d+\.\d+\.\d+|::1|0\.0\.0\.0|::|\*)$/i.test(host);
}

export function addressUnknown(role: Role): KvError {
  const learned = role === "prefill" ? " before its first answer" : "";
  const message = `the address of its side channel is not known${learned}`;
  return invalidConfig(
    message,
    `vLLM does not announce it over HTTP: give --${role}-side-channel-port, or kv.port of the instance in a configuration or discovery file (vLLM's default: 5600); --pairing off ends this warning`,
  );
}

/**
 * @throws `KV_HANDSHAKE_INCOMPATIBLE` if another engine answers requests than the side channel's.
 */
export function requireAnsweredEngine(
  entry: Entry,
  facts: EngineFacts,
  { host, port }: SideChannelAddress,
): void {
  const { answered } = entry;
  if (answered === undefined || sameEngine(answered.engineId, facts.engineId)) return;
  // The answered engine has restarted since it was read.
  if ([...entry.engines.keys()].some((id) => sameEngine(id, answered.engineId))) return;
  throw new KvError(
    "KV_HANDSHAKE_INCOMPATIBLE",
    `the side channel ${host}:${port} is that of engine ${facts.engineId}, but the instance answers as engine ${answered.engineId}`,
    {
      hint: "give each server its own VLLM_NIXL_SIDE_CHANNEL_PORT, and each instance the address of its own side channel",
    },
  );
}

export interface Fitting {
  readonly all: readonly PooledInstance[];
  readonly sure: readonly PooledInstance[];
}

/** Checks each pair of kinds once. */
export class Kinds {
  readonly #byKey: Record<Role, Map<string, Kind>> = { prefill: new Map(), decode: new Map() };
  #lastId = 0;

  constructor(private readonly mode: PairingSettings["mode"]) {}

  of(role: Role): Kind[] {
    return [...this.#byKey[role].values()];
  }

  /** Returns the entries of the other role whose checks have changed. */
  place(entry: Entry): Entry[] {
    const { role } = entry.instance;
    const key = kindKey(entry);
    if (entry.kind?.key === key) return [];
    const left = this.leave(entry);
    entry.kind = this.#byKey[role].get(key);
    entry.kind?.entries.add(entry);
    if (entry.kind !== undefined) return left;
    this.#lastId += 1;
    const created = new Kind(key, this.#lastId);
    created.entries.add(entry);
    this.#byKey[role].set(key, created);
    entry.kind = created;
    for (const kind of this.of(role === "prefill" ? "decode" : "prefill")) {
      const [other] = kind.entries;
      if (other === undefined) continue;
      const [p, d] = role === "prefill" ? [entry, other] : [other, entry];
      const check = checkEntries(p, d, this.mode);
      created.checks.set(kind, check);
      kind.checks.set(created, check);
    }
    return entriesOf(created);
  }

  /** Returns the entries of the other role whose checks have changed. */
  leave(entry: Entry): Entry[] {
    const { kind } = entry;
    if (kind === undefined) return [];
    kind.entries.delete(entry);
    if (kind.entries.size > 0) return [];
    this.#byKey[entry.instance.role].delete(kind.key);
    for (const other of kind.checks.keys()) other.checks.delete(kind);
    return entriesOf(kind);
  }
}

const entriesOf = ({ checks }: Kind): Entry[] =>
  [...checks.keys()].flatMap(({ entries }) => [...entries]);

function kindKey({ facts, namesake, instance }: Entry): string {
  const names = namesake === undefined ? [] : [instanceName(instance), instanceName(namesake)];
  return JSON.stringify([facts && checkKey(facts), instance.label, ...names]);
}

const SHARED_ID =
  "peers tell engines apart by engine_id, and would read the blocks of one from the other: give each server an engine_id of its own, or none, and restart those that had the same";

/** Clients get the text without the URLs. */
function sharedId({ facts, namesake, instance }: Entry): string {
  if (namesake === undefined) return "unique";
  return `${facts?.engineId} of two instances ${instanceName(instance)} ${instanceName(namesake)}`;
}

function checkEntries(p: Entry, d: Entry, mode: PairingSettings["mode"]): PairCheck {
  // Only with push do peers know a decode engine by its id.
  const isRead =
    d.namesake?.role === "prefill" || [p, d].some(({ facts }) => facts?.mode === "push");
  if (p.namesake !== undefined || (d.namesake !== undefined && isRead)) {
    const [prefill, decode] = [sharedId(p), sharedId(d)];
    return misfit([{ factor: "engine_id", prefill, decode }], SHARED_ID);
  }
  if (p.facts !== undefined && d.facts !== undefined) return checkPair(p.facts, d.facts);
  const [ours, theirs] = [p.instance.label, d.instance.label];
  if (mode !== "strict" && ours !== undefined && theirs !== undefined)
    return ours === theirs
      ? fitting()
      : misfit([{ factor: "label", prefill: ours, decode: theirs }]);
  if (mode === "lenient") return fitting();
  const side = (entry: Entry) => {
    if (entry.facts !== undefined) return "read";
    return mode === "label" && entry.instance.label === undefined
      ? "not read, without a label"
      : "not read";
  };
  return misfit([{ factor: "side_channel", prefill: side(p), decode: side(d) }]);
}

/**
 * Finds engines that share an id. Peers would silently read the second engine's blocks from the
 * first one's memory. An engine known before the other keeps its id. If both came together neither
 * does, as peers may know either.
 */
export class EngineIds {
  readonly #byId = new Map<string, Set<Entry>>();
  #changes = 0;

  came(entry: Entry): void {
    entry.cameAt = ++this.#changes;
  }

  /** Returns entries with a changed namesake. */
  note(entry: Entry, facts: EngineFacts | undefined): Entry[] {
    const before = entry.noted;
    if (before === facts) return [];
    const concerned = new Set(before && this.#byId.get(before.engineId));
    if (before !== undefined) this.#byId.get(before.engineId)?.delete(entry);
    if (before !== undefined && concerned.size === 1) this.#byId.delete(before.engineId);
    entry.noted = facts;
    entry.namesake = undefined;
    if (facts !== undefined) {
      if (before?.identity !== facts.identity) entry.notedAt = ++this.#changes;
      const namesakes = getOrAdd(this.#byId, facts.engineId, () => new Set<Entry>());
      for (const one of namesakes.add(entry)) concerned.add(one);
    }
    return [...concerned].filter((one) => this.#findNamesake(one));
  }

  #findNamesake(entry: Entry): boolean {
    const { noted, namesake: before } = entry;
    entry.namesake = undefined;
    for (const other of (noted && this.#byId.get(noted.engineId)) ?? []) {
      // One engine that registered its memory anew.
      const isOneChannel = addressOf(entry) === addressOf(other);
      const isOne = other.noted?.identity === noted?.identity || isOneChannel;
      if (isOne || entry.notedAt < other.cameAt) continue;
      entry.namesake = other.instance;
      // A decode engine's blocks may have no readers.
      if (other.instance.role === "prefill") break;
    }
    return entry.namesake !== before;
  }
}

const addressOf = ({ address }: Entry) => address && `${address.host}:${address.port}`;
