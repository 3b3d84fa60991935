import type { EngineFacts } from "./engine-facts.js";
import type { Entry } from "./pairing-entry.js";

/** The engine of an instance. */
interface Known {
  readonly facts: EngineFacts;
  readonly since: number;
}

/**
 * Finds instances whose engines have one id. A peer tells engines apart by their ids: it would take
 * the blocks of the second one from the memory of the first, without an error. An engine that was
 * known before the other instance came keeps its id. Of two that came together neither does, as a
 * peer may know either of them.
 */
export class EngineIds {
  readonly #byId = new Map<string, Set<Entry>>();
  readonly #known = new Map<Entry, Known>();
  #changes = 0;

  came(entry: Entry): void {
    entry.cameAt = ++this.#changes;
  }

  /**
   * Takes note of the engine of an instance, undefined where the instance has left. Returns those
   * that have another namesake than before.
   */
  note(entry: Entry, facts: EngineFacts | undefined): Entry[] {
    const before = this.#known.get(entry);
    if (before?.facts === facts) return [];
    const concerned = new Set(before && this.#byId.get(before.facts.engineId));
    if (before !== undefined) this.#take(entry, before.facts.engineId);
    entry.namesake = undefined;
    if (facts !== undefined) {
      const isSame = before?.facts.identity === facts.identity;
      this.#known.set(entry, { facts, since: isSame ? before.since : ++this.#changes });
      const namesakes = this.#byId.get(facts.engineId) ?? new Set();
      this.#byId.set(facts.engineId, namesakes.add(entry));
      for (const one of namesakes) concerned.add(one);
    }
    return [...concerned].filter((one) => this.#findNamesake(one));
  }

  #take(entry: Entry, engineId: string): void {
    const namesakes = this.#byId.get(engineId);
    namesakes?.delete(entry);
    if (namesakes?.size === 0) this.#byId.delete(engineId);
    this.#known.delete(entry);
  }

  #findNamesake(entry: Entry): boolean {
    const before = entry.namesake;
    const known = this.#known.get(entry);
    const namesakes = known && this.#byId.get(known.facts.engineId);
    entry.namesake = undefined;
    for (const other of namesakes ?? []) {
      const isOther = this.#known.get(other)?.facts.identity !== known?.facts.identity;
      // One engine that was read twice, and has registered its memory again between.
      const isOneChannel = addressOf(entry) === addressOf(other);
      if (!isOther || isOneChannel || (known?.since ?? 0) < other.cameAt) continue;
      entry.namesake = other.instance;
      // The blocks of a decode engine may have no readers.
      if (other.instance.role === "prefill") break;
    }
    return entry.namesake !== before;
  }
}

const addressOf = ({ address }: Entry) => address && `${address.host}:${address.port}`;
