import { instanceName, type Role } from "../instances/instance.js";
import { checkKey, checkPair, type PairCheck } from "./check-pair.js";
import type { EngineFacts } from "./engine-facts.js";
import type { Entry, Kind } from "./pairing-entry.js";
import type { PairingSettings } from "./pairing-settings.js";

/**
 * The kinds of instances of both roles, and which of them fit: each pair of kinds is checked once.
 */
export class Kinds {
  readonly #mode: PairingSettings["mode"];
  readonly #byKey: Record<Role, Map<string, Kind>> = { prefill: new Map(), decode: new Map() };
  #lastId = 0;

  constructor(mode: PairingSettings["mode"]) {
    this.#mode = mode;
  }

  of(role: Role): Kind[] {
    return [...this.#byKey[role].values()];
  }

  /**
   * Moves an entry to the kind of what is known about it. Returns the entries of the other role
   * whose checks have changed.
   */
  place(entry: Entry): Entry[] {
    const { role } = entry.instance;
    const key = kindKey(entry);
    if (entry.kind?.key === key) return [];
    const left = this.leave(entry);
    const known = this.#byKey[role].get(key);
    if (known !== undefined) {
      known.entries.add(entry);
      entry.kind = known;
      return left;
    }
    this.#lastId += 1;
    const created: Kind = { key, id: this.#lastId, entries: new Set([entry]), checks: new Map() };
    this.#byKey[role].set(key, created);
    entry.kind = created;
    for (const kind of this.of(otherRole(role))) {
      const [other] = kind.entries;
      if (other === undefined) continue;
      const [p, d] = role === "prefill" ? [entry, other] : [other, entry];
      const check = checkEntries(p, d, this.#mode);
      created.checks.set(kind, check);
      kind.checks.set(created, check);
    }
    return entriesOf(created);
  }

  /**
   * Takes an entry out of its kind. Returns the entries of the other role whose checks have
   * changed.
   */
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

const otherRole = (role: Role): Role => (role === "prefill" ? "decode" : "prefill");

/** Equal for instances of a role that are of one kind. */
function kindKey({ facts, namesake, instance }: Entry): string {
  const key = JSON.stringify([facts === undefined ? null : checkKey(facts), instance.label]);
  return namesake === undefined
    ? key
    : JSON.stringify([key, instanceName(instance), instanceName(namesake)]);
}

export function partnersOf({ checks }: Kind): number {
  let partners = 0;
  for (const [{ entries }, { fits }] of checks) if (fits) partners += entries.size;
  return partners;
}

export const fitsAny = (kind: Kind, is: (entry: Entry) => boolean): boolean =>
  fittingKinds(kind).some((other) => hasEntry(other, is));

export function hasEntry({ entries }: Kind, is: (entry: Entry) => boolean): boolean {
  for (const entry of entries) if (is(entry)) return true;
  return false;
}

export function fittingKinds(kind: Kind | undefined): Kind[] {
  const fitting: Kind[] = [];
  if (kind !== undefined)
    for (const [other, { fits }] of kind.checks) if (fits) fitting.push(other);
  return fitting;
}

/** Of a kind that fits none: the check with the fewest differences. */
export function nearest({ checks }: Kind): Extract<PairCheck, { fits: false }> | undefined {
  let best: Extract<PairCheck, { fits: false }> | undefined;
  for (const check of checks.values()) {
    if (check.fits) return undefined;
    if (best === undefined || check.differences.length < best.differences.length) best = check;
  }
  return best;
}

const LABELLED: PairCheck = { fits: true, basis: "label" };
const UNVERIFIED: PairCheck = { fits: true, basis: "unverified" };

const SHARED_ID =
  "peers tell engines apart by engine_id, and would read the blocks of one from the other: give each server an engine_id of its own, or none, and restart those that had the same";

/** An id, and the two instances that have it. Clients get the text without the URLs. */
function sharedId({ facts, namesake, instance }: Entry): string {
  if (namesake === undefined) return "unique";
  return `${facts?.engineId} of two instances ${instanceName(instance)} ${instanceName(namesake)}`;
}

/** Whether two instances are a pair: by their engines, or by `mode` where one is not read. */
function checkEntries(p: Entry, d: Entry, mode: PairingSettings["mode"]): PairCheck {
  // Peers know a decode engine by its id only with push.
  const isRead =
    d.namesake?.role === "prefill" || [p, d].some(({ facts }) => facts?.mode === "push");
  if (p.namesake !== undefined || (d.namesake !== undefined && isRead)) {
    const [prefill, decode] = [sharedId(p), sharedId(d)];
    return {
      fits: false,
      differences: [{ factor: "engine_id", prefill, decode }],
      note: SHARED_ID,
    };
  }
  if (p.facts !== undefined && d.facts !== undefined) return checkFacts(p.facts, d.facts);
  const [ours, theirs] = [p.instance.label, d.instance.label];
  if (mode !== "strict" && ours !== undefined && theirs !== undefined) {
    if (ours === theirs) return LABELLED;
    return { fits: false, differences: [{ factor: "label", prefill: ours, decode: theirs }] };
  }
  if (mode === "lenient") return UNVERIFIED;
  const side = (entry: Entry) => {
    if (entry.facts !== undefined) return "read";
    return mode === "label" && entry.instance.label === undefined
      ? "not read, without a label"
      : "not read";
  };
  return {
    fits: false,
    differences: [{ factor: "side_channel", prefill: side(p), decode: side(d) }],
  };
}

function checkFacts(prefill: EngineFacts, decode: EngineFacts): PairCheck {
  try {
    return checkPair(prefill, decode);
  } catch (thrown) {
    const note = thrown instanceof Error ? thrown.message : String(thrown);
    return { fits: false, differences: [{ factor: "plan", prefill: note, decode: note }], note };
  }
}
