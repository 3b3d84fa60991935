import type { Clock, KvError } from "@kv/interface";

/** The words of the producer's ranks about one registration, as they come. */
export interface Words {
  /** Agents that have written their share. */
  readonly done: ReadonlySet<string>;
  /** Agents that will not write, or no more. */
  readonly ended: ReadonlyMap<string, KvError>;
  /** Resolves at the next word. */
  next(): Promise<void>;
}

/** Words by the registration that they are about. */
export interface WordTable {
  /** From now on words about this wire id are heard; those that came a moment ago are among them. */
  open(wireId: string): Words;
  close(wireId: string): void;
  /** False when nobody listens: it is kept for a moment. */
  done(wireId: string, agent: string): boolean;
  ended(wireId: string, agent: string, error: KvError): void;
  /** Resolves every `next` without a word. */
  wakeAll(): void;
}

interface Listening extends Words {
  readonly done: Set<string>;
  readonly ended: Map<string, KvError>;
  heard(): void;
}

/** Words about requests that no step has told of yet: another rank's registration may bring them. */
const MOST_EARLY = 4096;
const EARLY_MS = 10_000;

export function createWordTable({ clock }: { clock: Clock }): WordTable {
  const open = new Map<string, Listening>();
  const early = new Map<string, { readonly agents: Set<string>; readonly sinceMs: number }>();
  return {
    open(wireId) {
      const before = early.get(wireId);
      early.delete(wireId);
      // Older than that it was about another use of the id.
      const fresh = before !== undefined && clock.now() - before.sinceMs < EARLY_MS;
      const words = listening(fresh ? before.agents : []);
      open.set(wireId, words);
      return words;
    },
    close: (wireId) => void open.delete(wireId),
    done(wireId, agent) {
      const words = open.get(wireId);
      if (words !== undefined) {
        words.done.add(agent);
        words.heard();
        return true;
      }
      const known = early.get(wireId) ?? { agents: new Set<string>(), sinceMs: clock.now() };
      known.agents.add(agent);
      early.set(wireId, known);
      const [oldest] = early.keys();
      if (early.size > MOST_EARLY && oldest !== undefined) early.delete(oldest);
      return false;
    },
    ended(wireId, agent, error) {
      const words = open.get(wireId);
      words?.ended.set(agent, error);
      words?.heard();
    },
    wakeAll() {
      for (const words of open.values()) words.heard();
    },
  };
}

function listening(before: Iterable<string>): Listening {
  let resolve: () => void = () => {};
  let next: Promise<void>;
  const arm = () => {
    next = new Promise((done) => {
      resolve = done;
    });
  };
  arm();
  return {
    done: new Set(before),
    ended: new Map(),
    next: () => next,
    heard() {
      resolve();
      arm();
    },
  };
}
