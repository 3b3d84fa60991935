import type { Ambient, AmbientOptions, KvError, Log } from "@kv/interface";
import type { MemoryRecord } from "../memory/memory.js";
import { type SeededRandom, seededRandom } from "../simulation/seeded-random.js";
import type {
  AgentEndpoint,
  InFlightTransfer,
  PostedNotification,
  SideChannelBinding,
} from "./endpoints.js";
import { type FaultPlan, type FaultRule, faultPlan } from "./fault-plan.js";
import { type MemoryHost, memoryHost } from "./host.js";
import { type MemoryLatency, type ResolvedLatency, resolveLatency } from "./latency.js";
import { NotificationChannels } from "./notification-channels.js";

/** Options of `memoryNetwork`. */
export interface MemoryNetworkOptions extends AmbientOptions {
  /** Latency and bandwidth. @default everything happens at once */
  readonly latency?: MemoryLatency | undefined;
  /** Fault rules. @default none */
  readonly faults?: readonly FaultRule[] | undefined;
  /**
   * Whether transfers with a peer that dies fail with `KV_PEER_DISCONNECTED`. When false, only the
   * caller's deadline ends them, and notifications to a dead peer are lost. @default true
   */
  readonly reportsPeerDeath?: boolean | undefined;
}

/** Options for a process that `host` or `restart` starts. */
export interface HostNamedOptions {
  /**
   * Milliseconds by which the process's clock is ahead of the network's. @default that of the
   * process before it, or 0
   */
  readonly skewMs?: number | undefined;
}

/** Keys of `MemoryNetwork.outstanding`. */
export type OutstandingKind =
  | "agents"
  | "memories"
  | "registrations"
  | "transfers"
  | "notifications"
  | "listeners"
  | "requests";

const PAGE_BYTES = 4096;
/**
 * An address of a user's mapping on x86-64. It is above 2^32, so that code which truncates
 * addresses to 32 bits fails.
 */
const FIRST_ADDRESS = 0x7f00_0000_0000;

/**
 * The shared state of one memory network: hosts, agents, links and faults. Callers outside this
 * package see a `MemoryNetwork`.
 */
export class Fabric {
  readonly clock: Ambient["clock"];
  readonly log: Log;
  readonly random: SeededRandom;
  readonly latency: ResolvedLatency;
  readonly faults: FaultPlan;
  readonly reportsPeerDeath: boolean;
  /** Agents by incarnation. */
  readonly agents = new Map<string, AgentEndpoint>();
  readonly transfers = new Set<InFlightTransfer>();
  readonly memories = new Set<MemoryRecord>();
  /** Listeners of side channels by `host:port`, with the names of simulated hosts. */
  readonly bindings = new Map<string, SideChannelBinding>();
  /** Requests on side channels without a reply. */
  requestsInFlight = 0;

  readonly #hosts = new Map<string, MemoryHost>();
  readonly #skewsMs = new Map<string, number>();
  /** When each cut link works again, in milliseconds of the network's clock. */
  readonly #cuts = new Map<string, number>();
  /** Until when the pieces that were scheduled keep each direction of a link busy. */
  readonly #busyUntilMs = new Map<string, number>();
  readonly #jitter: SeededRandom;
  readonly #channels: NotificationChannels;
  #nextAddress = FIRST_ADDRESS;

  constructor({ clock, log, random }: Ambient, options: MemoryNetworkOptions) {
    this.clock = clock;
    this.log = log;
    this.random = seededRandom(random.uuid());
    this.latency = resolveLatency(options.latency);
    this.#jitter = this.random.fork("latency");
    this.faults = faultPlan(options.faults ?? [], this.random.fork("faults"));
    this.reportsPeerDeath = options.reportsPeerDeath ?? true;
    this.#channels = new NotificationChannels(this);
  }

  /** Returns the live process of this name; starts one where there is none. */
  host(name: string, options: HostNamedOptions = {}): MemoryHost {
    const present = this.#hosts.get(name);
    if (present?.alive) return present;
    const incarnation = (present?.incarnation ?? 0) + 1;
    const skewMs = options.skewMs ?? this.#skewsMs.get(name) ?? 0;
    this.#skewsMs.set(name, skewMs);
    const host = memoryHost({
      name,
      incarnation,
      clock: this.clock,
      random: this.random.fork(`host ${name} ${incarnation}`),
      skewMs,
      killed: (killed, deliverInFlight) => this.#hostKilled(killed, deliverInFlight),
    });
    this.#hosts.set(name, host);
    return host;
  }

  restart(
    name: string,
    options: HostNamedOptions & { deliverInFlight?: number | undefined },
  ): MemoryHost {
    this.#hosts.get(name)?.kill(options);
    return this.host(name, options);
  }

  hostIsAlive(name: string): boolean {
    return this.#hosts.get(name)?.alive === true;
  }

  /** Returns a page-aligned address that was never returned before. */
  takeAddress(lengthBytes: number): number {
    const address = this.#nextAddress;
    // An unmapped page separates memories, so that a run which leaves one does not reach the next.
    this.#nextAddress += (Math.ceil(lengthBytes / PAGE_BYTES) + 1) * PAGE_BYTES;
    return address;
  }

  /** Draws the latency of one way, jitter included. */
  drawLatencyMs(): number {
    const { latencyMs, jitterMs } = this.latency;
    return latencyMs + (jitterMs > 0 ? this.#jitter.next() * jitterMs : 0);
  }

  /**
   * Returns how long a piece from one host to another takes, with the wait for pieces before it
   * where transfers share the bandwidth.
   */
  occupyLink(from: string, to: string, lengthBytes: number): number {
    const { bytesPerMs, sharesBandwidth } = this.latency;
    const copyMs = lengthBytes / bytesPerMs;
    if (!sharesBandwidth) return copyMs;
    const direction = JSON.stringify([from, to]);
    const nowMs = this.clock.now();
    const endMs = Math.max(nowMs, this.#busyUntilMs.get(direction) ?? 0) + copyMs;
    this.#busyUntilMs.set(direction, endMs);
    return endMs - nowMs;
  }

  isCut(hostA: string, hostB: string): boolean {
    const untilMs = this.#cuts.get(link(hostA, hostB));
    if (untilMs === undefined) return false;
    if (this.clock.now() < untilMs) return true;
    this.#cuts.delete(link(hostA, hostB));
    return false;
  }

  cut(hostA: string, hostB: string, forMs: number | undefined): void {
    const untilMs = forMs === undefined ? Number.POSITIVE_INFINITY : this.clock.now() + forMs;
    this.#cuts.set(link(hostA, hostB), untilMs);
    for (const transfer of [...this.transfers]) {
      if (link(transfer.from.host.name, transfer.to.host) === link(hostA, hostB)) {
        transfer.lostPeer("the hosts are disconnected");
      }
    }
  }

  reconnect(hostA: string, hostB: string): void {
    this.#cuts.delete(link(hostA, hostB));
  }

  removeAgent(endpoint: AgentEndpoint, reason: string): void {
    this.agents.delete(endpoint.incarnation);
    for (const transfer of [...this.transfers]) {
      if (transfer.to.incarnation === endpoint.incarnation) transfer.lostPeer(reason);
    }
  }

  /**
   * Sends a notification. Returns an error when the transport can know that the notification will
   * not arrive.
   */
  post(notification: PostedNotification): KvError | undefined {
    return this.#channels.post(notification);
  }

  outstanding(): Readonly<Record<OutstandingKind, number>> {
    return {
      agents: this.agents.size,
      memories: this.memories.size,
      registrations: [...this.agents.values()].reduce((sum, agent) => sum + agent.memories.size, 0),
      transfers: this.transfers.size,
      notifications: this.#channels.inFlight,
      listeners: this.bindings.size,
      requests: this.requestsInFlight,
    };
  }

  #hostKilled(host: MemoryHost, deliverInFlight: number): void {
    this.#channels.hostKilled(host, deliverInFlight);
    for (const memory of [...this.memories]) if (memory.host === host) this.memories.delete(memory);
    this.log.debug("memory-host-killed", { host: host.name, incarnation: host.incarnation });
  }
}

function link(hostA: string, hostB: string): string {
  return JSON.stringify([hostA, hostB].sort());
}
