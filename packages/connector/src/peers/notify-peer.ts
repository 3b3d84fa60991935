import type { Peers } from "./peer-table.js";
import type { Background } from "../worker/task-tracker.js";
import { addressOf, isMeant } from "./acquire-peer.js";
import type { RemoteRequest } from "../scheduler/step-types.js";
import type { RemoteLink } from "./remote-engine.js";

/** Says something about a request to the producer that is meant, when the link to it is there; nobody waits for it. */
export function tellPeer(
  remote: RemoteRequest,
  say: (link: RemoteLink) => void,
  options: {
    readonly peers: Peers<RemoteLink>;
    readonly background: Background;
    failed(error: unknown): void;
  },
): void {
  options.background.track(
    options.peers.acquire(addressOf(remote)).then((hold) => {
      if (isMeant(hold.peer, remote)) say(hold.peer);
      hold.release();
    }, options.failed),
  );
}
