import type { Instance } from "../instances/instance.js";
import type { PooledInstance } from "../instances/pooled-instance.js";
import type { KvEventStatus } from "../kv-events/kv-event-stream.js";

/** The part of a client's request that routing strategies read. */
export interface RoutedRequest {
  /** The top-level members of the request's JSON body. */
  readonly fields: Readonly<Record<string, unknown>>;
  /** The token ids of the prompt, where an instance has rendered it. A prompt of token ids needs none. */
  readonly tokenIds?: ArrayLike<number> | undefined;
}

/** The request that an instance is chosen for. */
export interface RoutingContext {
  /** The request's id, unique among those in flight. */
  readonly requestId: string;
  /** The client's request; absent where any instance can answer, as for `/v1/models`. */
  readonly request?: RoutedRequest | undefined;
  /** The client's HTTP headers, names in lower case. */
  readonly headers?: Readonly<Record<string, string | readonly string[] | undefined>> | undefined;
  /** Only these may serve its prefill leg. The first one that is available is chosen, without the strategy. */
  readonly prefillers?: readonly PooledInstance[] | undefined;
  /** Chosen for prefill while it is among the candidates; the strategy is not called then. */
  readonly preferredPrefill?: Instance | undefined;
  /** Chosen for decode while it is among the candidates; the strategy is not called then. */
  readonly preferredDecode?: Instance | undefined;
}

/** A strategy that chooses among instances. Each role has one of its own, as most strategies keep state. */
export interface Routing {
  /** The strategy's name on status pages and in errors. */
  readonly name: string;
  /** Chooses one of `candidates`, which are never empty and in the order of the pool; undefined refuses the request. */
  choose(candidates: readonly Instance[], context: RoutingContext): Instance | undefined;
  /**
   * How many tokens of the request's prompt, from its first, an instance has in its prefix cache, as far as the strategy knows: exact for token ids
   * and instances that publish KV events, else estimated with `charactersPerToken`. 0 where nothing is known.
   */
  cachedTokens?(instance: Instance, context: RoutingContext, charactersPerToken: number): number;
  /** Whether the strategy would choose better with the token ids of a chat (`RoutedRequest.tokenIds`). */
  readsTokenIds?(): boolean;
  /** How much the strategy knows of an instance's prefix cache by its KV events; null for an instance that publishes none. */
  kvEvents?(instance: Instance): KvEventStatus | null;
  /** Called with all instances of the pool after each change. */
  instancesChanged?(instances: readonly Instance[]): void;
  /** Releases the strategy's resources. */
  close?(): void;
}

/** Whose turn it is: the instance that was not chosen for the longest time, so turns stay even while some are left out. */
class Turns {
  readonly #chosenAt = new WeakMap<Instance, number>();
  #turn = 0;
  /** The candidates of the last choice. They are the same list while no instance changes: then the next one follows in it. */
  #candidates: readonly Instance[] = [];
  #next = 0;

  /** The candidate whose turn it is, of those that are `eligible`. */
  choose(
    candidates: readonly Instance[],
    eligible: (candidate: Instance) => boolean = () => true,
  ): Instance | undefined {
    const at =
      candidates === this.#candidates ? this.#following(eligible) : this.#earliest(candidates, eligible);
    const chosen = candidates[at];
    if (chosen !== undefined) this.#chosenAt.set(chosen, ++this.#turn);
    this.#candidates = candidates;
    this.#next = at + 1;
    return chosen;
  }

  #following(eligible: (candidate: Instance) => boolean): number {
    const count = this.#candidates.length;
    for (let step = 0; step < count; step += 1) {
      const at = (this.#next + step) % count;
      const candidate = this.#candidates[at];
      if (candidate !== undefined && eligible(candidate)) return at;
    }
    return -1;
  }

  #earliest(candidates: readonly Instance[], eligible: (candidate: Instance) => boolean): number {
    let earliest = -1;
    let earliestTurn = Number.POSITIVE_INFINITY;
    for (const [at, candidate] of candidates.entries()) {
      const turn = this.#chosenAt.get(candidate) ?? 0;
      if (turn >= earliestTurn || !eligible(candidate)) continue;
      earliest = at;
      earliestTurn = turn;
    }
    return earliest;
  }
}

/** Each instance in turn. */
export function roundRobin(): Routing {
  const turns = new Turns();
  return { name: "round-robin", choose: (candidates) => turns.choose(candidates) };
}

/** The instance with the fewest requests in flight; among equals each in turn. */
export function leastLoad(): Routing {
  const turns = new Turns();
  return {
    name: "least-load",
    choose(candidates) {
      const fewest = fewestInFlight(candidates);
      return turns.choose(candidates, ({ inFlight }) => inFlight === fewest);
    },
  };
}

/** The load of the least loaded instance. */
export function fewestInFlight(instances: readonly Instance[]): number {
  let fewest = Number.POSITIVE_INFINITY;
  for (const { inFlight } of instances) if (inFlight < fewest) fewest = inFlight;
  return fewest;
}
