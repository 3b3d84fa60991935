import { KvError } from "@kv/interface";
import { describeEngine, type EngineAddress } from "./engine-address.js";
import type { Peer } from "./peer.js";

/** Confirmed generations that an entry remembers. */
const MAX_CONFIRMED = 16;

/** A peer of `PeerTable`, from the start of its opening until it is closed. */
export interface PeerEntry<P extends Peer> {
  readonly key: string;
  readonly address: EngineAddress;
  readonly opened: Promise<P>;
  peer: P | undefined;
  references: number;
  lastUsedMs: number;
  /** Set when the entry has left the table. It closes with its last reference. */
  dropped: boolean;
  /** The handshake that runs beside this entry. */
  renewal?: Promise<void> | undefined;
  /** When the next handshake beside this entry may start. */
  renewableAtMs: number;
  /** Registration generations that requests named and that a handshake has confirmed, for peers that do not send their own. */
  readonly confirmed: Set<number>;
  /** Ends the wait of `close()` for a dropped entry. */
  closed?: () => void;
}

/** Whether the open peer has the registration that the parameters of a request name. `asked`: further handshakes would not help. */
export function hasRegistration<P extends Peer>(
  { confirmed }: PeerEntry<P>,
  peer: P,
  { registrationGeneration: named }: EngineAddress,
  asked: boolean,
): boolean {
  if (named === undefined) return true;
  if (peer.registrationGeneration !== undefined) return named <= peer.registrationGeneration;
  // vLLM's handshake does not say it. Once another handshake has given the same metadata, the open peer is current, whatever was named.
  return asked || confirmed.size === 0 || confirmed.has(named);
}

/** Records a generation that a handshake has confirmed. */
export function confirm<P extends Peer>({ confirmed }: PeerEntry<P>, generation: number | undefined): void {
  if (generation === undefined) return;
  confirmed.add(generation);
  const [oldest] = confirmed;
  if (confirmed.size > MAX_CONFIRMED && oldest !== undefined) confirmed.delete(oldest);
}

/** The error for parameters whose registration the peer does not have. */
export function unknownRegistration(address: EngineAddress, peer: Peer): KvError {
  const [named, found] = [address.registrationGeneration, peer.registrationGeneration];
  return new KvError(
    "KV_GENERATION_STALE",
    `kv_transfer_params name registration ${named} of the KV cache of ${describeEngine(address)}, which has registered it ${found} times`,
    {
      hint: "pass the kv_transfer_params of the prefill answer on unchanged",
      details: { named, found },
    },
  );
}
