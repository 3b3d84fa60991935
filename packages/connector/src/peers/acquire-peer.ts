import { KvError } from "@kv/interface";
import type { PeerAddress, PeerHold, Peers } from "./peer-table.js";
import type { RemoteEngine, RemoteRequest } from "../scheduler/step-types.js";
import type { RemoteLink } from "./remote-engine.js";

export interface FreshLinkOptions {
  readonly peers: Peers<RemoteLink>;
  /** The process that answers at the engine's address now; asked when the request means another one than the link. */
  currentIncarnation(remote: RemoteRequest, signal: AbortSignal): Promise<string>;
}

/**
 * The link to the very process that a request means: parameters outlive the process that made them, and so do links. Errors:
 * those of `Peers.acquire`; the signal's reason; `KV_GENERATION_STALE` when that process is gone.
 */
export async function freshLink(
  remote: RemoteRequest,
  signal: AbortSignal,
  { peers, currentIncarnation }: FreshLinkOptions,
): Promise<PeerHold<RemoteLink>> {
  for (let again = false; ; again = true) {
    const hold = await whileWanted(peers.acquire(addressOf(remote)), signal);
    if (isMeant(hold.peer, remote)) return hold;
    hold.release();
    const { incarnation } = hold.peer;
    const current = again ? incarnation : await currentIncarnation(remote, signal);
    if (current === incarnation) throw stale(remote);
    peers.drop(remote.engineId, "another process answers in its place", hold.peer);
  }
}

/** Whether the link leads to the process that made these parameters, as far as both of them tell. */
export function isMeant({ incarnation }: RemoteLink, { lease }: RemoteRequest): boolean {
  return incarnation === undefined || lease === undefined || incarnation === lease.incarnation;
}

export function addressOf(engine: RemoteEngine): PeerAddress {
  const { engineId, host, port, tpSize, dcpSize, ppSize, registrationGeneration } = engine;
  return { engineId, host, port, tpSize, dcpSize, ppSize, registrationGeneration };
}

/** The hold, unless the signal says first that nobody wants it; then it is let go of when it comes. */
export function whileWanted<Peer>(
  acquiring: Promise<PeerHold<Peer>>,
  signal: AbortSignal,
): Promise<PeerHold<Peer>> {
  return new Promise((resolve, reject) => {
    const onAbort = () => reject(signal.reason as Error);
    if (signal.aborted) onAbort();
    else signal.addEventListener("abort", onAbort);
    acquiring.then(
      (hold) => {
        signal.removeEventListener("abort", onAbort);
        if (signal.aborted) hold.release();
        else resolve(hold);
      },
      (error: unknown) => {
        signal.removeEventListener("abort", onAbort);
        reject(error as Error);
      },
    );
  });
}

function stale({ engineId, requestId, host, port }: RemoteRequest): KvError {
  return new KvError(
    "KV_GENERATION_STALE",
    `request ${requestId} was prefilled by an engine ${engineId} that is gone; another process answers at ${host}:${port}`,
    { hint: "send the prompt to a prefill worker again", details: { engineId, requestId, host, port } },
  );
}
