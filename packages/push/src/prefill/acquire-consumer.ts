import { type PeerHold, type Peers, whileWanted } from "@kv/connector";
import { KvError } from "@kv/interface";
import type { Offer } from "../control.js";
import { consumerAddress } from "./offer-names.js";
import type { WriteLink } from "./consumer-link.js";

/**
 * The link to the very process that made an offer: a restarted consumer comes back under the same name, and the link that is there
 * may lead to the process before it. A vLLM consumer does not tell which process it is, and gets the link that is there. Errors: those of
 * `Peers.acquire`; the signal's reason; `KV_GENERATION_STALE` when that process is gone.
 */
export async function consumerLink(
  offer: Offer,
  peers: Peers<WriteLink>,
  signal: AbortSignal = new AbortController().signal,
): Promise<PeerHold<WriteLink>> {
  for (let again = false; ; again = true) {
    const hold = await whileWanted(peers.acquire(consumerAddress(offer)), signal);
    if (offer.own === undefined || hold.peer.incarnation === offer.own.incarnation) return hold;
    hold.release();
    if (again) {
      throw new KvError(
        "KV_GENERATION_STALE",
        `request ${offer.wireId} was registered by an engine ${offer.engineId} that is gone; another process answers at ${offer.host}:${offer.port}`,
      );
    }
    peers.drop(offer.engineId, "another process answers in its place", hold.peer);
  }
}
