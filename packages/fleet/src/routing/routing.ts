import type { Instance, KvEventStatus } from "../instances/instance.js";
import type { PooledInstance } from "../instances/pooled-instance.js";
import { LeastLoaded } from "./least-loaded.js";

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
  /** Called after each change of an instance's `inFlight`. Without these calls, strategies look at the load of each candidate. */
  loadChanged?(instance: Instance): void;
  /** Releases the strategy's resources. */
  close?(): void;
}

/** Each instance in turn. */
export function roundRobin(): Routing {
  const chosenAt = new WeakMap<Instance, number>();
  let turn = 0;
  /** By candidates, which are the same list while no instance changes: whose turn it is in it. Instances of two versions are two lists. */
  const turns = new WeakMap<readonly Instance[], number>();
  // The one that was not chosen for the longest time, so that turns stay even while some are left out.
  const earliest = (candidates: readonly Instance[]) => {
    let found = 0;
    let earliestTurn = Number.POSITIVE_INFINITY;
    for (const [at, candidate] of candidates.entries()) {
      const chosenTurn = chosenAt.get(candidate) ?? 0;
      if (chosenTurn >= earliestTurn) continue;
      found = at;
      earliestTurn = chosenTurn;
    }
    return found;
  };
  return {
    name: "round-robin",
    choose(candidates) {
      const { length } = candidates;
      const turnOf = (at: number) => chosenAt.get(candidates[at % length] as Instance) ?? 0;
      let at = turns.get(candidates) ?? earliest(candidates);
      // Those that were chosen from another list meanwhile are passed over.
      for (let left = length; left > 1 && turnOf(at) > turnOf(at + 1); left -= 1) at += 1;
      at %= length;
      const chosen = candidates[at];
      if (chosen !== undefined) chosenAt.set(chosen, ++turn);
      turns.set(candidates, at + 1);
      return chosen;
    },
  };
}

/** The instance with the fewest requests in flight; among equals each in turn. */
export function leastLoad(): Routing {
  const byLoad = new LeastLoaded();
  return {
    name: "least-load",
    choose: (candidates) => byLoad.choose(candidates),
    loadChanged: (instance) => byLoad.loadChanged(instance),
  };
}
