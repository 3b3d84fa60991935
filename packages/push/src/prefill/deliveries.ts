import type { Offer } from "../control.js";
import type { Produced } from "./registration-matcher.js";
import { consumerOf } from "./offer-names.js";
import { ranksServed } from "./consumer-link.js";

/** A finished request and the ranks of its consumer. */
export interface Delivery {
  readonly produced: Produced;
  /** The consumer's ranks that this rank serves. */
  readonly ranks: readonly number[];
  /** Ranks that have their share, or want none. */
  readonly over: Set<number>;
  /** WRITEs under way, or waiting for their turn. */
  writing: number;
}

/** Which ranks of its consumer a finished request has been brought to. */
export interface Deliveries {
  /** Errors: `KV_TOPOLOGY_INVALID`. */
  open(produced: Produced, offer: Offer): Delivery;
  get(wireId: string): Delivery | undefined;
  delete(wireId: string): void;
  clear(): void;
}

export function createDeliveries(local: { readonly tpRank: number; readonly tpSize: number }): Deliveries {
  const deliveries = new Map<string, Delivery>();
  return {
    open(produced, offer) {
      const known = deliveries.get(produced.wireId);
      if (known !== undefined) return known;
      const ranks = ranksServed(local, offer.tpSize);
      const delivery: Delivery = { produced, ranks, over: new Set(), writing: 0 };
      produced.consumer = consumerOf(offer);
      deliveries.set(produced.wireId, delivery);
      return delivery;
    },
    get: (wireId) => deliveries.get(wireId),
    delete: (wireId) => void deliveries.delete(wireId),
    clear: () => deliveries.clear(),
  };
}
