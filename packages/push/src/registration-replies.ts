import type { Clock, KvError } from "@kv/interface";

/**
 * How many done notifications are kept for requests that no step has named yet: another rank's
 * registration may cause them.
 */
const MAX_EARLY = 4096;
/**
 * How many agents are kept for one registration: more than a producer has ranks. An agent states
 * its name itself, so it may use many.
 */
const MAX_AGENTS = 4096;
/** An older early notification belongs to another use of the id. */
const EARLY_MS = 10_000;

/** What a rank of P says: `written` with the registration's secret; the others prove nothing. */
type Reply = "done" | "failed" | "written";

/** The replies of producers, by the registration that they answer. */
export class PushReplies {
  readonly #clock: Clock;
  readonly #open = new Map<string, RegistrationReplies>();
  readonly #early = new Map<string, { readonly agents: Set<string>; readonly sinceMs: number }>();

  constructor({ clock }: { readonly clock: Clock }) {
    this.#clock = clock;
  }

  /**
   * Collects the replies to a registration from now on, with the done notifications that arrived a
   * moment ago.
   */
  open(wireId: string): RegistrationReplies {
    const early = this.#early.get(wireId);
    this.#early.delete(wireId);
    const isFresh = early !== undefined && this.#clock.now() - early.sinceMs < EARLY_MS;
    const replies = new RegistrationReplies(isFresh ? early.agents : []);
    this.#open.set(wireId, replies);
    return replies;
  }

  close(wireId: string): void {
    this.#open.delete(wireId);
  }

  /**
   * Records what a rank says. Returns false if no registration with this id is open; a done
   * notification is then kept for a moment.
   */
  add(reply: Reply, wireId: string, agent: string): boolean {
    const replies = this.#open.get(wireId);
    if (replies !== undefined) {
      if (replies[reply].size < MAX_AGENTS) replies[reply].add(agent);
      replies.wake();
    } else if (reply === "done") this.#addEarly(wireId, agent);
    return replies !== undefined;
  }

  /**
   * Records a rank's notice with the registration's secret that it does not write, or has stopped.
   * Does nothing if no registration with this id is open.
   */
  ended(wireId: string, agent: string, error: KvError): void {
    const replies = this.#open.get(wireId);
    if (replies === undefined) return;
    if (replies.ended.size < MAX_AGENTS || replies.ended.has(agent))
      replies.ended.set(agent, error);
    replies.wake();
  }

  /** Marks all open replies as abandoned and wakes everything that waits for them. */
  abandonAll(): void {
    for (const replies of this.#open.values()) {
      replies.abandoned = true;
      replies.wake();
    }
  }

  #addEarly(wireId: string, agent: string): void {
    const early = this.#early.get(wireId) ?? {
      agents: new Set<string>(),
      sinceMs: this.#clock.now(),
    };
    if (early.agents.size < MAX_AGENTS) early.agents.add(agent);
    this.#early.set(wireId, early);
    const [oldest] = this.#early.keys();
    if (this.#early.size > MAX_EARLY && oldest !== undefined) this.#early.delete(oldest);
  }
}

/** What a producer's ranks have said about one registration, by their agents. */
export class RegistrationReplies implements Record<Reply, Set<string>> {
  readonly done: Set<string>;
  readonly failed = new Set<string>();
  readonly written = new Set<string>();
  readonly ended = new Map<string, KvError>();
  abandoned = false;
  #resolve: () => void = () => {};
  #next = this.#nextWake();

  constructor(early: Iterable<string>) {
    this.done = new Set(early);
  }

  next(): Promise<void> {
    return this.#next;
  }

  wake(): void {
    this.#resolve();
    this.#next = this.#nextWake();
  }

  #nextWake(): Promise<void> {
    return new Promise((resolve) => {
      this.#resolve = resolve;
    });
  }
}
