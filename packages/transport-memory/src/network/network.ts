import { ambient, KvError } from "@kv/interface";
import {
  Fabric,
  type HostNamedOptions,
  type MemoryNetworkOptions,
  type OutstandingKind,
} from "./fabric.js";
import type { FaultKind, FaultRule } from "./fault-plan.js";
import type { MemoryHost } from "./host.js";

/** Simulated hosts, and the network between their agents and side channels. */
export interface MemoryNetwork {
  /**
   * Returns the live process of this name. Starts it at the first call, and at the first call after
   * a `kill`.
   */
  host(name: string, options?: HostNamedOptions): MemoryHost;
  /**
   * Kills the process, if it is alive, and returns its successor. `deliverInFlight` is that of
   * `MemoryHost.kill`.
   */
  restart(
    name: string,
    options?: HostNamedOptions & { deliverInFlight?: number | undefined },
  ): MemoryHost;
  /**
   * Cuts the link between two hosts for `forMs` milliseconds, or until `reconnect`. Transfers
   * between them fail, and notifications in flight are lost.
   */
  disconnect(hostA: string, hostB: string, options?: { forMs?: number | undefined }): void;
  /** Repairs the link between two hosts. */
  reconnect(hostA: string, hostB: string): void;
  /**
   * Replaces all fault rules.
   *
   * @throws `KV_CONFIG_INVALID`.
   */
  setFaults(rules: readonly FaultRule[]): void;
  /** Returns the number of injected faults by kind. */
  faultCounts(): Readonly<Partial<Record<FaultKind, number>>>;
  /**
   * Returns the number of objects held or in flight. All are zero when every host was killed or has
   * closed what it opened.
   */
  outstanding(): Readonly<Record<OutstandingKind, number>>;
}

const fabrics = new WeakMap<MemoryNetwork, Fabric>();

/**
 * Returns the internal state of a network, for the parts of this package.
 * @throws `KV_CONFIG_INVALID` for any other object.
 */
export function fabricOf(network: MemoryNetwork): Fabric {
  const fabric = fabrics.get(network);
  if (fabric === undefined) {
    throw new KvError(
      "KV_CONFIG_INVALID",
      "the network was not created by memoryNetwork() of this package",
    );
  }
  return fabric;
}

/**
 * Creates a network. Transports and side channels that share it can reach each other.
 * @throws `KV_CONFIG_INVALID` for latency or fault rules.
 */
export function memoryNetwork(options: MemoryNetworkOptions = {}): MemoryNetwork {
  const fabric = new Fabric(ambient(options), options);
  const network: MemoryNetwork = {
    host: (name, hostOptions) => fabric.host(name, hostOptions),
    restart: (name, restartOptions = {}) => fabric.restart(name, restartOptions),
    disconnect: (hostA, hostB, { forMs } = {}) => fabric.cut(hostA, hostB, forMs),
    reconnect: (hostA, hostB) => fabric.reconnect(hostA, hostB),
    setFaults: (rules) => fabric.faults.setRules(rules),
    faultCounts: () => fabric.faults.counts(),
    outstanding: () => fabric.outstanding(),
  };
  fabrics.set(network, fabric);
  return network;
}
