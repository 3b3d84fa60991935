import type { Ambient, KvError, Notification } from "@kv/interface";
import type { MemoryRecord } from "../memory/memory.js";
import type { MemoryMap } from "../memory/memory-map.js";
import type { SeededRandom } from "../simulation/seeded-random.js";
import type { FaultPlan } from "./fault-plan.js";
import type { MemoryHost } from "./host.js";
import type { ResolvedLatency } from "./latency.js";

/** An agent, as the network sees it. */
export interface AgentEndpoint {
  readonly name: string;
  readonly incarnation: string;
  readonly host: MemoryHost;
  /** What is registered right now. */
  readonly memories: MemoryMap<MemoryRecord>;
  deliver(notification: Notification): void;
}

/** A peer, as an agent knows it from metadata; it may be long dead. */
export interface PeerAddress {
  readonly name: string;
  readonly incarnation: string;
  readonly host: string;
}

/** A transfer that has not been released. */
export interface FlyingTransfer {
  readonly from: AgentEndpoint;
  readonly to: PeerAddress;
  /** The peer cannot be reached any more. */
  lostPeer(reason: string): void;
}

export interface SideChannelBinding {
  readonly host: MemoryHost;
  answer(
    frames: readonly Uint8Array[],
  ): Promise<readonly Uint8Array[] | undefined> | readonly Uint8Array[] | undefined;
}

export interface PostedNotification {
  readonly from: AgentEndpoint;
  readonly to: PeerAddress;
  readonly payload: Uint8Array;
}

/** What the parts of one memory network share; not for callers, who hold a `MemoryNetwork`. */
export interface Fabric extends Ambient {
  readonly random: SeededRandom;
  readonly latency: ResolvedLatency;
  readonly faults: FaultPlan;
  readonly reportsPeerDeath: boolean;
  /** By incarnation. */
  readonly agents: Map<string, AgentEndpoint>;
  readonly transfers: Set<FlyingTransfer>;
  readonly memories: Set<MemoryRecord>;
  /** Listeners of side channels by `host:port`, under the names of simulated hosts. */
  readonly bindings: Map<string, SideChannelBinding>;
  /** Requests on side channels that have not been answered. */
  requestsInFlight: number;
  host(name: string): MemoryHost;
  hostIsAlive(name: string): boolean;
  /** Page-aligned, never handed out twice. */
  takeAddress(lengthBytes: number): number;
  /** Latency of one way, jitter included. */
  drawLatencyMs(): number;
  isCut(hostA: string, hostB: string): boolean;
  cut(hostA: string, hostB: string, forMs: number | undefined): void;
  removeAgent(endpoint: AgentEndpoint, reason: string): void;
  /** Sends; answers why not when the transport can know that it will not arrive. */
  post(notification: PostedNotification): KvError | undefined;
}
