import type { Notification } from "@kv/interface";
import type { MemoryRecord } from "../memory/memory.js";
import type { MemoryMap } from "../memory/memory-map.js";
import type { MemoryHost } from "./host.js";

/** An agent, as the network sees it. */
export interface AgentEndpoint {
  readonly name: string;
  readonly incarnation: string;
  readonly host: MemoryHost;
  /** Memory that is registered now. */
  readonly memories: MemoryMap<MemoryRecord>;
  deliver(notification: Notification): void;
}

/** A peer, as an agent knows it from metadata. The peer may have died since. */
export interface PeerAddress {
  readonly name: string;
  readonly incarnation: string;
  readonly host: string;
}

/** A transfer that is not released. */
export interface InFlightTransfer {
  readonly from: AgentEndpoint;
  readonly to: PeerAddress;
  /** Called when the peer can no longer be reached. */
  lostPeer(reason: string): void;
}

/** A listener of a side channel. */
export interface SideChannelBinding {
  readonly host: MemoryHost;
  /** The keys of an encrypted listener. */
  readonly keys: (() => readonly Uint8Array[]) | undefined;
  answer(
    frames: readonly Uint8Array[],
  ): Promise<readonly Uint8Array[] | undefined> | readonly Uint8Array[] | undefined;
}

/** A notification that an agent sends. */
export interface PostedNotification {
  readonly from: AgentEndpoint;
  readonly to: PeerAddress;
  readonly payload: Uint8Array;
}
