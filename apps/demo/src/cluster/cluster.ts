import type { Log } from "@kv/interface";
import { createProxy } from "@kv/proxy";
import { memoryNetwork, memorySideChannel, memoryTransport } from "@kv/transport-memory";
import { closers } from "../instance/closers.js";
import { demoConnectors } from "../instance/connectors.js";
import { startInstance } from "../instance/instance.js";
import { readInstanceConfig } from "../instance/instance-config.js";
import { startChild } from "../processes/child-process.js";
import type { LogLevel } from "../processes/json-log.js";
import { type Supervised, supervise } from "../processes/supervisor.js";
import { type ClusterOptions, type PlannedInstance, planInstances, planProxy } from "./cluster-plan.js";

/** A server of the cluster. */
export interface ClusterMember {
  readonly name: string;
  readonly url: string;
  readonly backend: string | null;
  /** Absent on the memory transport, where all run in this process. */
  readonly process?: Pick<Supervised, "pid" | "replaced">;
}

/** Prefill and decode instances and a proxy in front of them, all up. */
export interface Cluster {
  readonly proxy: ClusterMember;
  readonly prefills: readonly ClusterMember[];
  readonly decodes: readonly ClusterMember[];
  /** Leaves nothing behind: no process, listener, timer. */
  close(): Promise<void>;
}

export interface StartOptions {
  readonly log: Log;
  readonly logLevel: LogLevel;
  /** Start a process again that ends. */
  readonly restart?: boolean;
  /** Port of the proxy; 0 takes a free one. */
  readonly proxyPort?: number;
}

export async function startCluster(options: ClusterOptions, start: StartOptions): Promise<Cluster> {
  return options.transport === "memory" ? startHere(options, start) : startProcesses(options, start);
}

/** The memory transport reaches no other process: all instances in this one, with the same HTTP and handshakes. */
async function startHere(options: ClusterOptions, { log, proxyPort = 0 }: StartOptions): Promise<Cluster> {
  const opened = closers(log);
  const network = memoryNetwork();
  const registry = demoConnectors();
  const launch = async ({ name, config }: PlannedInstance): Promise<ClusterMember> => {
    const instance = await startInstance(readInstanceConfig(config), {
      log,
      transport: memoryTransport({ network, host: name }),
      sideChannel: memorySideChannel({ network, host: name }),
      resolveConnector: (transfer) => registry.resolve(transfer),
    });
    opened.add(name, () => instance.drain());
    return { name, url: instance.url, backend: instance.backend };
  };
  try {
    const planned = planInstances(options);
    const prefills = await Promise.all(planned.prefills.map(launch));
    const decodes = await Promise.all(planned.decodes.map(launch));
    const settings = planProxy(urls(prefills), urls(decodes), options);
    const proxy = createProxy({ ...settings, log });
    opened.add("proxy", () => proxy.close());
    const { url } = await proxy.listen({ port: proxyPort });
    return { proxy: { name: "proxy", url, backend: null }, prefills, decodes, close: () => opened.close() };
  } catch (error) {
    await opened.close();
    throw error;
  }
}

async function startProcesses(options: ClusterOptions, start: StartOptions): Promise<Cluster> {
  const { log, logLevel, restart = false, proxyPort = 0 } = start;
  const opened = closers(log);
  const launch = async (
    name: string,
    role: string,
    config: object,
    firstPort = 0,
  ): Promise<ClusterMember> => {
    const args = (port: number) => [
      role,
      "--log-level",
      logLevel,
      "--config",
      JSON.stringify({ ...config, port }),
    ];
    const server = await supervise({
      start: (port) => startChild({ name, args: args(port === 0 ? firstPort : port) }),
      restart,
      log,
    });
    opened.add(name, () => server.stop());
    return { name, url: server.url, backend: server.backend, process: server };
  };
  const launchAll = (planned: readonly PlannedInstance[]) =>
    Promise.allSettled(planned.map(({ name, config }) => launch(name, "instance", config)));
  try {
    const planned = planInstances(options);
    // All have started or failed before anything is stopped again: no process is forgotten half-way.
    const [prefills, decodes] = await Promise.all([launchAll(planned.prefills), launchAll(planned.decodes)]);
    const [ups, downs] = [fulfilled(prefills), fulfilled(decodes)];
    const proxy = await launch("proxy", "proxy", planProxy(urls(ups), urls(downs), options), proxyPort);
    return { proxy, prefills: ups, decodes: downs, close: () => opened.close() };
  } catch (error) {
    await opened.close();
    throw error;
  }
}

function fulfilled(results: readonly PromiseSettledResult<ClusterMember>[]): ClusterMember[] {
  return results.map((result) => {
    if (result.status === "rejected") throw result.reason;
    return result.value;
  });
}

function urls(members: readonly ClusterMember[]): string[] {
  return members.map(({ url }) => url);
}
