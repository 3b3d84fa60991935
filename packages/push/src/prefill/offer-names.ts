import type { PeerAddress } from "@kv/connector";
import type { Offer } from "../control.js";

/** Where the consumer that made an offer shakes hands. */
export function consumerAddress({ engineId, host, port, tpSize }: Offer): PeerAddress {
  return { engineId, host, port, tpSize, dcpSize: 1, ppSize: 1 };
}

/** The consumer request that an offer is part of. */
export function consumerOf({ engineId, wireId, own }: Offer): string {
  return JSON.stringify([engineId, wireId, own?.incarnation, own?.generation]);
}

/** The offer of one rank; a vLLM consumer's ranks all speak for the whole. */
export function keyOf(offer: Offer): string {
  return `${consumerOf(offer)} ${offer.own?.rank ?? "all"}`;
}
