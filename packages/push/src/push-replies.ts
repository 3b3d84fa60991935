import type { Clock, KvError } from "@kv/interface";

/** The done and ended notifications that a producer's ranks sent for one registration. */
export interface RegistrationReplies {
  /** Agents of the ranks that have written their share, by notifications of vLLM's form, which prove nothing. */
  readonly done: ReadonlySet<string>;
  /** Agents of the ranks that have written their share, by notices with the registration's secret. */
  readonly written: ReadonlySet<string>;
  /** Agents of the ranks that do not write, or have stopped, and why. */
  readonly ended: ReadonlyMap<string, KvError>;
  /** True when the worker closes and no longer waits for producers. */
  readonly abandoned: boolean;
  /** Resolves at the next notification, and when `abandoned` becomes true. */
  next(): Promise<void>;
}

/** How many done notifications are kept for requests that no step has named yet: another rank's registration may cause them. */
const MAX_EARLY = 4096;
/** How many agents are kept for one registration: more than a producer has ranks. An agent states its name itself, so it may use many. */
const MAX_AGENTS = 4096;
/** How long such a notification is kept, in milliseconds. An older one belongs to another use of the id. */
const EARLY_MS = 10_000;

/** The replies of producers, by the registration that they answer. */
export class PushReplies {
  readonly #clock: Clock;
  readonly #open = new Map<string, OpenReplies>();
  readonly #early = new Map<string, { readonly agents: Set<string>; readonly sinceMs: number }>();

  constructor({ clock }: { readonly clock: Clock }) {
    this.#clock = clock;
  }

  /** Collects the replies to a registration from now on, with the done notifications that arrived a moment ago. */
  open(wireId: string): RegistrationReplies {
    const early = this.#early.get(wireId);
    this.#early.delete(wireId);
    const isFresh = early !== undefined && this.#clock.now() - early.sinceMs < EARLY_MS;
    const replies = new OpenReplies(isFresh ? early.agents : []);
    this.#open.set(wireId, replies);
    return replies;
  }

  /** Stops collecting the replies to a registration. */
  close(wireId: string): void {
    this.#open.delete(wireId);
  }

  /** Records that a rank has written its share. False if no registration with this id is open; the notification is kept for a moment. */
  done(wireId: string, agent: string): boolean {
    const replies = this.#open.get(wireId);
    if (replies !== undefined) {
      if (replies.done.size < MAX_AGENTS) replies.done.add(agent);
      replies.wake();
      return true;
    }
    const early = this.#early.get(wireId) ?? { agents: new Set<string>(), sinceMs: this.#clock.now() };
    if (early.agents.size < MAX_AGENTS) early.agents.add(agent);
    this.#early.set(wireId, early);
    const [oldest] = this.#early.keys();
    if (this.#early.size > MAX_EARLY && oldest !== undefined) this.#early.delete(oldest);
    return false;
  }

  /** Records a rank's notice with the registration's secret that it has written. Does nothing if no registration with this id is open. */
  written(wireId: string, agent: string): void {
    const replies = this.#open.get(wireId);
    replies?.written.add(agent);
    replies?.wake();
  }

  /** Records that a rank does not write, or has stopped. Does nothing if no registration with this id is open. */
  ended(wireId: string, agent: string, error: KvError): void {
    const replies = this.#open.get(wireId);
    if (replies === undefined) return;
    if (replies.ended.size < MAX_AGENTS || replies.ended.has(agent)) replies.ended.set(agent, error);
    replies.wake();
  }

  /** Marks all open replies as abandoned and wakes everything that waits for them. */
  abandonAll(): void {
    for (const replies of this.#open.values()) {
      replies.abandoned = true;
      replies.wake();
    }
  }
}

class OpenReplies implements RegistrationReplies {
  readonly done: Set<string>;
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
