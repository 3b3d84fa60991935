import { baseRequestId, type LeaseOrder, type SendableRequest } from "@kv/connector";
import type { Clock } from "@kv/interface";
import type { Offer } from "../control.js";
import { createNameIndex, namesOf } from "./request-aliases.js";
import { createRecent } from "./expiring-set.js";

/** A request of this producer, from the step that admits it until its blocks are free. */
export interface Produced {
  readonly requestId: string;
  readonly wireId: string;
  readonly generation: number;
  order: SendableRequest;
  /** Set when the forward pass is over. */
  finished: LeaseOrder | undefined;
  /** The consumer request that it goes to: the first that matched. */
  consumer: string | undefined;
}

/** What became of an offer, or of a finished request, when it was looked for on the other side. */
export type Match =
  | { readonly kind: "produced"; readonly produced: Produced }
  /** Not yet: the prompt is being computed, or has not come. */
  | { readonly kind: "wait" }
  /** Never: why. */
  | { readonly kind: "gone"; readonly why: string };

/**
 * Who belongs to whom. A producer holds requests and offers of blocks; each finds the other whichever comes first. A consumer of ours
 * that has the producer's answer names the very request and the very use of its blocks; else ids are compared, exactly, then
 * without the suffixes that the two engines added. Only the writer changes these tables.
 */
export interface Matching {
  admit(order: SendableRequest): void;
  finish(order: LeaseOrder): Produced;
  /** The request is over, whatever became of it. */
  end(produced: Produced): void;
  byWireId(wireId: string): Produced | undefined;
  byRequestId(requestId: string): Produced | undefined;
  /** Under any name that a peer may have for it. */
  named(name: string): Iterable<Produced>;
  all(): Iterable<Produced>;
  find(offer: Offer, incarnation: string | undefined): Match;
  wait(key: string, offer: Offer): void;
  waiting(key: string): Offer | undefined;
  takeOffer(key: string): Offer | undefined;
  /** Offers of our own peers that a running request may go to when it finishes; they stay in the table. */
  offersFor(produced: Produced): Iterable<[key: string, offer: Offer]>;
  /** Offers that a finished request may go to, of one consumer request, and out of the table. */
  takeOffersFor(produced: Produced): [key: string, offer: Offer][];
  /** Offers that name a request that has failed, and out of the table. */
  takeOffersNaming(requestId: string): [key: string, offer: Offer][];
  oldestOffer(): { readonly key: string; readonly offer: Offer; readonly sinceMs: number } | undefined;
  readonly offers: number;
  readonly produced: number;
  clear(): void;
}

export interface MatchingOptions {
  readonly clock: Clock;
  /** How long an ended request is remembered by its base id, to tell a late offer at once that there is nothing to come. */
  readonly rememberMs: number;
  /** The consumer request that an offer is part of; offers of its ranks have it in common. */
  consumerOf(offer: Offer): string;
}

const MOST_REMEMBERED = 65_536;

export function createMatching({ clock, rememberMs, consumerOf }: MatchingOptions): Matching {
  const byWireId = new Map<string, Produced>();
  const byRequestId = new Map<string, Produced>();
  const byBase = createNameIndex<Produced>();
  const byName = createNameIndex<Produced>();
  const offers = new Map<string, Offer>();
  /** In order of arrival. */
  const sinceMs = new Map<string, number>();
  const offersByName = createNameIndex<string>();
  const endedBases = createRecent({ clock, rememberMs, most: MOST_REMEMBERED });
  let latestGeneration = 0;

  function admit(order: SendableRequest): Produced {
    const known = byWireId.get(order.wireId);
    if (known !== undefined) {
      // Preempted, and admitted again with other blocks.
      known.order = order;
      return known;
    }
    const { requestId, wireId, generation } = order;
    const produced: Produced = {
      requestId,
      wireId,
      generation,
      order,
      finished: undefined,
      consumer: undefined,
    };
    latestGeneration = Math.max(latestGeneration, generation);
    byWireId.set(wireId, produced);
    byRequestId.set(requestId, produced);
    byBase.add(baseRequestId(requestId), produced);
    for (const name of namesFor(produced)) byName.add(name, produced);
    return produced;
  }

  function takeOffer(key: string): Offer | undefined {
    const offer = offers.get(key);
    if (offer === undefined) return undefined;
    offers.delete(key);
    sinceMs.delete(key);
    offersByName.delete(nameOf(offer), key);
    return offer;
  }

  /** The waiting offers that could mean this request, those that want blocks first, then in order of arrival. */
  function candidates(produced: Meant): [string, Offer][] {
    const found: [string, Offer][] = [];
    for (const name of [exactly(produced.wireId), baseRequestId(produced.requestId)]) {
      for (const key of offersByName.of(name)) {
        const offer = offers.get(key);
        if (offer !== undefined && mayMean(offer, produced)) found.push([key, offer]);
      }
    }
    const rank = ([, offer]: [string, Offer]) =>
      (offer.blockIds.length === 0 ? 2 : 0) + (offer.matchId === produced.requestId ? 0 : 1);
    return found.sort((a, b) => rank(a) - rank(b));
  }

  return {
    admit: (order) => void admit(order),
    finish(order) {
      const produced = admit(order);
      produced.finished = order;
      return produced;
    },
    end(produced) {
      if (!byWireId.delete(produced.wireId)) return;
      byRequestId.delete(produced.requestId);
      const base = baseRequestId(produced.requestId);
      byBase.delete(base, produced);
      for (const name of namesFor(produced)) byName.delete(name, produced);
      endedBases.add(base);
    },
    byWireId: (wireId) => byWireId.get(wireId),
    byRequestId: (requestId) => byRequestId.get(requestId),
    named: (name) => byName.of(name),
    all: () => byWireId.values(),
    find(offer, incarnation) {
      const { own } = offer;
      const prefill = own?.prefill;
      if (prefill !== undefined) {
        if (incarnation === undefined) return { kind: "wait" };
        if (prefill.incarnation !== incarnation) {
          return { kind: "gone", why: "the prefill worker was restarted since it computed the prompt" };
        }
        const produced = byWireId.get(prefill.wireId);
        if (produced !== undefined && produced.generation === prefill.generation) {
          return claim(produced, consumerOf(offer));
        }
        // Generations are told in the order in which they begin: one that was passed over is over.
        return prefill.generation > latestGeneration
          ? { kind: "wait" }
          : { kind: "gone", why: "the prefill worker keeps the blocks of that request no longer" };
      }
      const base = baseRequestId(offer.matchId);
      const exact = byRequestId.get(offer.matchId);
      let running = false;
      let taken = false;
      for (const produced of exact === undefined ? byBase.of(base) : [exact]) {
        if (!mayMean(offer, produced)) continue;
        const match = claim(produced, consumerOf(offer));
        if (match.kind === "produced") return match;
        running ||= match.kind === "wait";
        taken ||= match.kind === "gone";
      }
      if (!running && (taken || endedBases.has(base))) {
        return { kind: "gone", why: "the request of that name has ended at the prefill worker" };
      }
      return { kind: "wait" };
    },
    wait(key, offer) {
      offers.set(key, offer);
      sinceMs.set(key, clock.now());
      offersByName.add(nameOf(offer), key);
    },
    waiting: (key) => offers.get(key),
    takeOffer,
    offersFor(produced) {
      const { numTokens } = produced.order;
      return candidates(produced).filter(
        ([, { own, blockIds }]) => own !== undefined && own.numTokens === numTokens && blockIds.length > 0,
      );
    },
    takeOffersFor(produced) {
      const found = candidates(produced);
      const first = found[0];
      if (first === undefined) return [];
      const consumer = produced.consumer ?? consumerOf(first[1]);
      const taken = found.filter(([, offer]) => consumerOf(offer) === consumer);
      for (const [key] of taken) takeOffer(key);
      return taken;
    },
    takeOffersNaming(requestId) {
      const produced = { requestId, wireId: requestId, generation: -1, finished: undefined };
      const taken = candidates(produced);
      for (const [key] of taken) takeOffer(key);
      // One that comes later is told the same.
      endedBases.add(baseRequestId(requestId));
      return taken;
    },
    oldestOffer() {
      for (const [key, atMs] of sinceMs) {
        const offer = offers.get(key);
        if (offer !== undefined) return { key, offer, sinceMs: atMs };
      }
      return undefined;
    },
    get offers() {
      return offers.size;
    },
    get produced() {
      return byWireId.size;
    },
    clear() {
      for (const produced of [...byWireId.values()]) {
        byBase.delete(baseRequestId(produced.requestId), produced);
        for (const name of namesFor(produced)) byName.delete(name, produced);
      }
      byWireId.clear();
      byRequestId.clear();
      for (const key of [...offers.keys()]) takeOffer(key);
      endedBases.clear();
    },
  };
}

/** A finished request goes to one consumer request, and to all of its ranks. */
function claim(produced: Produced, consumer: string): Match {
  if (produced.finished === undefined) return { kind: "wait" };
  if (produced.consumer === undefined || produced.consumer === consumer)
    return { kind: "produced", produced };
  return { kind: "gone", why: "its blocks were given to another decode request" };
}

type Meant = Pick<Produced, "requestId" | "wireId" | "generation" | "finished">;

function mayMean({ own, matchId }: Offer, { requestId, wireId, generation, finished }: Meant): boolean {
  const prefill = own?.prefill;
  if (prefill !== undefined) return prefill.wireId === wireId && prefill.generation === generation;
  // Two prompts may come under one id of a client's: their lengths tell them apart, where they differ.
  if (own !== undefined && finished !== undefined && own.numTokens !== finished.numTokens) return false;
  return matchId === requestId || baseRequestId(matchId) === baseRequestId(requestId);
}

/** Under which an offer waits: the very request where it names one, else the base of its id. */
function nameOf({ own, matchId }: Offer): string {
  return own?.prefill === undefined ? baseRequestId(matchId) : exactly(own.prefill.wireId);
}

function exactly(wireId: string): string {
  return `=${wireId}`;
}

function namesFor({ requestId, wireId }: Pick<Produced, "requestId" | "wireId">): Set<string> {
  const names = new Set([wireId]);
  for (const name of namesOf(requestId)) names.add(name);
  return names;
}
