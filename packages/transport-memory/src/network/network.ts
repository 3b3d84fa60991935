import { type Ambient, ambient, KvError } from "@kv/interface";
import { type SeededRandom, seededRandom } from "../simulation/seeded-random.js";
import type { AgentEndpoint, Fabric } from "./fabric.js";
import { type FaultKind, type FaultRule, faultPlan } from "./fault-plan.js";
import { type MemoryHost, memoryHost } from "./host.js";
import { type MemoryLatency, resolveLatency } from "./latency.js";
import { notificationChannels } from "./notification-channels.js";

export interface MemoryNetworkOptions extends Partial<Ambient> {
  readonly latency?: MemoryLatency;
  readonly faults?: readonly FaultRule[];
  /**
   * Whether transfers with a peer that dies end in `KV_PEER_DISCONNECTED`; true by default. When false they end by the
   * caller's deadline alone, and notifications to a dead peer vanish.
   */
  readonly reportsPeerDeath?: boolean;
}

export interface HostNamedOptions {
  /** How far the clock of a process made by this call is ahead of the network's; as before a restart, or 0. */
  readonly skewMs?: number;
}

/** Simulated hosts, and what passes between their agents and side channels. */
export interface MemoryNetwork {
  /** The living process of this name; made by the first call, and by the first one after a `kill`. */
  host(name: string, options?: HostNamedOptions): MemoryHost;
  /** Kills the process where it lives, and answers the one that follows it. */
  restart(name: string, options?: HostNamedOptions & { deliverInFlight?: number }): MemoryHost;
  /** The two lose each other, for `forMs` or until `reconnect`: transfers between them fail, notifications are lost. */
  disconnect(hostA: string, hostB: string, options?: { forMs?: number }): void;
  reconnect(hostA: string, hostB: string): void;
  /** Takes the place of all fault rules. */
  setFaults(rules: readonly FaultRule[]): void;
  /** Faults so far, by kind. */
  faultCounts(): Readonly<Partial<Record<FaultKind, number>>>;
  /** What is held or under way; all zero when every host was killed or has closed what it opened. */
  outstanding(): Readonly<Record<OutstandingKind, number>>;
}

export type OutstandingKind =
  | "agents"
  | "memories"
  | "registrations"
  | "transfers"
  | "notifications"
  | "listeners"
  | "requests";

const PAGE_BYTES = 4096;
/** As a user's mapping on x86-64: above 2^32, so that whoever cuts addresses to 32 bits is found out. */
const FIRST_ADDRESS = 0x7f00_0000_0000;

const fabrics = new WeakMap<MemoryNetwork, Fabric>();

/** The inside of a network; for the parts of this package. */
export function fabricOf(network: MemoryNetwork): Fabric {
  const fabric = fabrics.get(network);
  if (fabric === undefined) {
    throw new KvError("KV_CONFIG_INVALID", "network is not one that memoryNetwork() of this package made");
  }
  return fabric;
}

export function memoryNetwork(options: MemoryNetworkOptions = {}): MemoryNetwork {
  const given = ambient(options);
  const random: SeededRandom = seededRandom(given.random.uuid());
  const hosts = new Map<string, MemoryHost>();
  const skews = new Map<string, number>();
  const cuts = new Map<string, number>();
  const latency = resolveLatency(options.latency);
  const jitter = random.fork("latency");
  let nextAddress = FIRST_ADDRESS;

  const link = (hostA: string, hostB: string): string => JSON.stringify([hostA, hostB].sort());

  function killed(host: MemoryHost, deliverInFlight: number): void {
    channels.hostKilled(host, deliverInFlight);
    for (const memory of [...fabric.memories]) if (memory.host === host) fabric.memories.delete(memory);
    fabric.log.debug("memory-host-killed", { host: host.name, incarnation: host.incarnation });
  }

  function hostNamed(name: string, hostOptions: HostNamedOptions = {}): MemoryHost {
    const present = hosts.get(name);
    if (present?.alive) return present;
    const incarnation = (present?.incarnation ?? 0) + 1;
    const skewMs = hostOptions.skewMs ?? skews.get(name) ?? 0;
    skews.set(name, skewMs);
    const host = memoryHost({
      name,
      incarnation,
      clock: given.clock,
      random: random.fork(`host ${name} ${incarnation}`),
      skewMs,
      killed,
    });
    hosts.set(name, host);
    return host;
  }

  const fabric: Fabric = {
    ...given,
    random,
    latency,
    faults: faultPlan(options.faults ?? [], random.fork("faults")),
    reportsPeerDeath: options.reportsPeerDeath ?? true,
    agents: new Map(),
    transfers: new Set(),
    memories: new Set(),
    bindings: new Map(),
    requestsInFlight: 0,
    host: hostNamed,
    hostIsAlive: (name) => hosts.get(name)?.alive === true,
    takeAddress(lengthBytes) {
      const address = nextAddress;
      // An unmapped page between memories: a run that leaves one never lands in the next.
      nextAddress += (Math.ceil(lengthBytes / PAGE_BYTES) + 1) * PAGE_BYTES;
      return address;
    },
    drawLatencyMs: () => latency.latencyMs + (latency.jitterMs > 0 ? jitter.next() * latency.jitterMs : 0),
    isCut(hostA, hostB) {
      const untilMs = cuts.get(link(hostA, hostB));
      if (untilMs === undefined) return false;
      if (given.clock.now() < untilMs) return true;
      cuts.delete(link(hostA, hostB));
      return false;
    },
    cut(hostA, hostB, forMs) {
      cuts.set(
        link(hostA, hostB),
        forMs === undefined ? Number.POSITIVE_INFINITY : given.clock.now() + forMs,
      );
      for (const transfer of [...fabric.transfers]) {
        if (link(transfer.from.host.name, transfer.to.host) === link(hostA, hostB)) {
          transfer.lostPeer("the hosts are disconnected");
        }
      }
    },
    removeAgent(endpoint: AgentEndpoint, reason: string) {
      fabric.agents.delete(endpoint.incarnation);
      for (const transfer of [...fabric.transfers]) {
        if (transfer.to.incarnation === endpoint.incarnation) transfer.lostPeer(reason);
      }
    },
    post: (notification) => channels.post(notification),
  };
  const channels = notificationChannels(fabric);

  const network: MemoryNetwork = {
    host: hostNamed,
    restart(name, restartOptions = {}) {
      hosts.get(name)?.kill(restartOptions);
      return hostNamed(name, restartOptions);
    },
    disconnect: (hostA, hostB, { forMs } = {}) => fabric.cut(hostA, hostB, forMs),
    reconnect: (hostA, hostB) => void cuts.delete(link(hostA, hostB)),
    setFaults: (rules) => fabric.faults.setRules(rules),
    faultCounts: () => fabric.faults.counts(),
    outstanding: () => ({
      agents: fabric.agents.size,
      memories: fabric.memories.size,
      registrations: [...fabric.agents.values()].reduce((sum, agent) => sum + agent.memories.size, 0),
      transfers: fabric.transfers.size,
      notifications: channels.inFlight,
      listeners: fabric.bindings.size,
      requests: fabric.requestsInFlight,
    }),
  };
  fabrics.set(network, fabric);
  return network;
}
