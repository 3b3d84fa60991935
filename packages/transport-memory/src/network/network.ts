import {
  type Ambient,
  type AmbientOptions,
  ambient,
  KvError,
  type Log,
  type Notification,
  type Timer,
} from "@kv/interface";
import type { MemoryMap, MemoryRecord } from "../memory/memory.js";
import { type SeededRandom, seededRandom } from "../simulation/seeded-random.js";
import { delayOf, type FaultKind, FaultPlan, type FaultRule } from "./fault-plan.js";
import { type MemoryHost, memoryHost } from "./host.js";
import { type MemoryLatency, type ResolvedLatency, resolveLatency } from "./latency.js";

/** Options of `memoryNetwork`. */
export interface MemoryNetworkOptions extends AmbientOptions {
  readonly latency?: MemoryLatency | undefined;
  readonly faults?: readonly FaultRule[] | undefined;
  /**
   * Whether a peer's death fails its transfers with `KV_PEER_DISCONNECTED`. Otherwise only the
   * caller's deadline ends them, and its notifications are lost. @default true
   */
  readonly reportsPeerDeath?: boolean | undefined;
}

/** Options of `host` and `restart`. */
export interface HostNamedOptions {
  /** How far its clock is ahead of the network's. @default that of the process before it, or 0 */
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

/** Simulated hosts, and the network between their agents and side channels. */
export interface MemoryNetwork {
  /** The live process of this name; starts one if there is none. */
  host(name: string, options?: HostNamedOptions): MemoryHost;
  /** Kills the process and returns its successor. */
  restart(
    name: string,
    options?: HostNamedOptions & { deliverInFlight?: number | undefined },
  ): MemoryHost;
  /**
   * Cuts a link for `forMs` milliseconds, or until `reconnect`. Transfers fail, and notifications
   * in flight are lost.
   */
  disconnect(hostA: string, hostB: string, options?: { forMs?: number | undefined }): void;
  reconnect(hostA: string, hostB: string): void;
  /**
   * Replaces all fault rules.
   *
   * @throws `KV_CONFIG_INVALID`.
   */
  setFaults(rules: readonly FaultRule[]): void;
  faultCounts(): Readonly<Partial<Record<FaultKind, number>>>;
  /** Counts objects held or in flight; all zero after kills and closes. */
  outstanding(): Readonly<Record<OutstandingKind, number>>;
}

export interface AgentEndpoint {
  readonly name: string;
  readonly incarnation: string;
  readonly host: MemoryHost;
  readonly memories: MemoryMap<MemoryRecord>;
  deliver(notification: Notification): void;
}

/** From metadata; the peer may have died since. */
export interface PeerAddress {
  readonly name: string;
  readonly incarnation: string;
  readonly host: string;
}

export interface InFlightTransfer {
  readonly from: AgentEndpoint;
  readonly to: PeerAddress;
  lostPeer(reason: string): void;
}

export interface SideChannelBinding {
  readonly host: MemoryHost;
  readonly keys: (() => readonly Uint8Array[]) | undefined;
  answer(
    frames: readonly Uint8Array[],
  ): Promise<readonly Uint8Array[] | undefined> | readonly Uint8Array[] | undefined;
}

interface PostedNotification {
  readonly from: AgentEndpoint;
  readonly to: PeerAddress;
  readonly payload: Uint8Array;
}

interface InFlightNotification extends PostedNotification {
  readonly timer: Timer;
}

interface Channel {
  readonly queue: InFlightNotification[];
  lastAtMs: number;
}

const PAGE_BYTES = 4096;
/** A user address on x86-64, above 2^32: code that truncates it to 32 bits fails. */
const FIRST_ADDRESS = 0x7f00_0000_0000;

/**
 * One memory network's state: hosts, agents, links, notifications in flight and faults. Other
 * packages see a `MemoryNetwork`.
 */
export class Fabric implements MemoryNetwork {
  readonly clock: Ambient["clock"];
  readonly log: Log;
  readonly random: SeededRandom;
  readonly latency: ResolvedLatency;
  readonly faults: FaultPlan;
  readonly reportsPeerDeath: boolean;
  readonly agents = new Map<string, AgentEndpoint>();
  readonly transfers = new Set<InFlightTransfer>();
  readonly memories = new Set<MemoryRecord>();
  readonly bindings = new Map<string, SideChannelBinding>();
  requestsInFlight = 0;

  readonly #hosts = new Map<string, MemoryHost>();
  readonly #skewsMs = new Map<string, number>();
  readonly #cuts = new Map<string, number>();
  readonly #busyUntilMs = new Map<string, number>();
  readonly #jitter: SeededRandom;
  readonly #channels = new Map<string, Channel>();
  readonly #notifications = new Set<InFlightNotification>();
  #nextAddress = FIRST_ADDRESS;

  constructor({ clock, log, random }: Ambient, options: MemoryNetworkOptions) {
    this.clock = clock;
    this.log = log;
    this.random = seededRandom(random.uuid());
    this.latency = resolveLatency(options.latency);
    this.#jitter = this.random.fork("latency");
    this.faults = new FaultPlan(options.faults ?? [], this.random.fork("faults"));
    this.reportsPeerDeath = options.reportsPeerDeath ?? true;
  }

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
    options: HostNamedOptions & { deliverInFlight?: number | undefined } = {},
  ): MemoryHost {
    this.#hosts.get(name)?.kill(options);
    return this.host(name, options);
  }

  hostIsAlive(name: string): boolean {
    return this.#hosts.get(name)?.alive === true;
  }

  /** Page-aligned and new. */
  takeAddress(lengthBytes: number): number {
    const address = this.#nextAddress;
    // An unmapped page keeps a run that leaves its memory from reaching the next.
    this.#nextAddress += (Math.ceil(lengthBytes / PAGE_BYTES) + 1) * PAGE_BYTES;
    return address;
  }

  drawLatencyMs(): number {
    const { latencyMs, jitterMs } = this.latency;
    return latencyMs + (jitterMs > 0 ? this.#jitter.next() * jitterMs : 0);
  }

  /** How long a piece takes, with the wait for earlier ones where bandwidth is shared. */
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

  disconnect(
    hostA: string,
    hostB: string,
    { forMs }: { readonly forMs?: number | undefined } = {},
  ): void {
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

  setFaults(rules: readonly FaultRule[]): void {
    this.faults.setRules(rules);
  }

  faultCounts(): Readonly<Partial<Record<FaultKind, number>>> {
    return this.faults.counts();
  }

  /** @throws `KV_NOTIFICATION_FAILED` when the transport can know that it will not arrive. */
  post(notification: PostedNotification): void {
    const { from, to, payload } = notification;
    const refuse = (reason: string): never => {
      throw new KvError(
        "KV_NOTIFICATION_FAILED",
        `a notification of ${payload.length} bytes from agent ${from.name} to ${to.name} failed: ${reason}`,
      );
    };
    const rule = this.faults.decide({
      operation: "NOTIFY",
      from: from.host.name,
      fromAgent: from.name,
      to: to.host,
      toAgent: to.name,
      lengthBytes: payload.length,
      payload,
    });
    if (rule?.fault === "disconnect") this.disconnect(from.host.name, to.host, rule);
    if (rule?.fault === "fail") refuse("an injected fault");
    if (this.isCut(from.host.name, to.host)) refuse("the hosts are disconnected");
    if (!this.agents.has(to.incarnation)) {
      if (this.reportsPeerDeath) refuse("the peer is gone");
      return;
    }
    if (rule?.fault === "drop") return;
    this.#send(notification, delayOf(rule, "delay", "reorder"), rule?.fault !== "reorder");
    if (rule?.fault === "duplicate") this.#send(notification, 0, true);
  }

  outstanding(): Readonly<Record<OutstandingKind, number>> {
    return {
      agents: this.agents.size,
      memories: this.memories.size,
      registrations: [...this.agents.values()].reduce((sum, agent) => sum + agent.memories.size, 0),
      transfers: this.transfers.size,
      notifications: this.#notifications.size,
      listeners: this.bindings.size,
      requests: this.requestsInFlight,
    };
  }

  #send(notification: PostedNotification, extraMs: number, keepsOrder: boolean): void {
    const { from, to } = notification;
    const key = `${from.incarnation} ${to.incarnation}`;
    const channel = this.#channels.get(key) ?? { queue: [], lastAtMs: 0 };
    const nowMs = this.clock.now();
    let atMs = nowMs + this.drawLatencyMs() + extraMs;
    if (keepsOrder) atMs = channel.lastAtMs = Math.max(atMs, channel.lastAtMs);
    // Delivers the queue's head: real timers may fire out of order by a millisecond.
    const arrived = () => this.#deliver(keepsOrder ? channel.queue[0] : sent);
    const timer = this.clock.setTimer(arrived, atMs - nowMs, { ref: true });
    const sent: InFlightNotification = { ...notification, timer };
    this.#notifications.add(sent);
    if (!keepsOrder) return;
    this.#channels.set(key, channel);
    channel.queue.push(sent);
  }

  #deliver(sent: InFlightNotification | undefined): void {
    if (sent === undefined) return;
    this.#forget(sent);
    const { from, to, payload } = sent;
    if (this.isCut(from.host.name, to.host)) return;
    this.agents.get(to.incarnation)?.deliver({ from: from.name, payload: payload.slice() });
  }

  #forget(sent: InFlightNotification): void {
    this.#notifications.delete(sent);
    const key = `${sent.from.incarnation} ${sent.to.incarnation}`;
    const queue = this.#channels.get(key)?.queue ?? [];
    const index = queue.indexOf(sent);
    if (index >= 0) queue.splice(index, 1);
    if (queue.length === 0) this.#channels.delete(key);
  }

  #hostKilled(host: MemoryHost, deliverInFlight: number): void {
    for (const sent of [...this.#notifications]) {
      if (sent.from.host !== host || this.random.next() < deliverInFlight) continue;
      sent.timer.cancel();
      this.#forget(sent);
    }
    for (const memory of [...this.memories]) if (memory.host === host) this.memories.delete(memory);
    this.log.debug("memory-host-killed", { host: host.name, incarnation: host.incarnation });
  }
}

/**
 * Creates a network for transports and side channels that reach each other.
 * @throws `KV_CONFIG_INVALID` for latency or fault rules.
 */
export function memoryNetwork(options: MemoryNetworkOptions = {}): MemoryNetwork {
  return new Fabric(ambient(options), options);
}

/** @throws `KV_CONFIG_INVALID` for any other object. */
export function fabricOf(network: MemoryNetwork): Fabric {
  if (network instanceof Fabric) return network;
  throw new KvError(
    "KV_CONFIG_INVALID",
    "the network was not created by memoryNetwork() of this package",
  );
}

function link(hostA: string, hostB: string): string {
  return JSON.stringify([hostA, hostB].sort());
}
