import type { IncomingHttpHeaders } from "node:http";
import type { Instance } from "./instance.js";
import type { GenerationRequest } from "./request-body.js";

export interface RoutingContext {
  readonly requestId: string;
  /** The client's request; absent where one only asks for something that any instance knows, as `/v1/models`. */
  readonly request?: GenerationRequest;
  readonly headers?: IncomingHttpHeaders;
  /** Taken while it is among the candidates; the strategy is not asked then. */
  readonly preferredPrefill?: Instance;
}

/** Chooses among instances. One for each role, as most strategies keep state. */
export interface Routing {
  readonly name: string;
  /** `candidates` is never empty, and always in the order of the settings. */
  choose(candidates: readonly Instance[], context: RoutingContext): Instance | undefined;
  /** All instances there are, whenever one came or went. */
  instancesChanged?(instances: readonly Instance[]): void;
  close?(): void;
}

/** Each in turn: the one that has waited longest, so that the turns stay even while some are left out. */
export function roundRobin(): Routing {
  const turns = new WeakMap<Instance, number>();
  let turn = 0;
  return {
    name: "round-robin",
    choose(candidates) {
      let chosen = candidates[0];
      for (const candidate of candidates) {
        if (chosen === undefined || (turns.get(candidate) ?? 0) < (turns.get(chosen) ?? 0))
          chosen = candidate;
      }
      if (chosen !== undefined) turns.set(chosen, ++turn);
      return chosen;
    },
  };
}
