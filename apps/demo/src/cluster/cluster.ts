import { openTracer } from "@kv/fleet/front-end";
import type { Log } from "@kv/interface";
import { createProxy, type ProxySettingsInput } from "@kv/proxy";
import { zmqSideChannel } from "@kv/side-channel";
import { memoryNetwork, memorySideChannel, memoryTransport } from "@kv/transport-memory";
import { CloseStack } from "../instance/close-stack.js";
import type { SideChannelAddress } from "../instance/engine-rank.js";
import { startInstance } from "../instance/instance.js";
import { readInstanceConfig } from "../instance/instance-config.js";
import { openTransport } from "../instance/modules.js";
import { type Child, SupervisedServer, startChild } from "../processes/child-process.js";
import type { LogLevel } from "../processes/json-log.js";
import {
  type ClusterOptions,
  type PlannedInstance,
  planInstances,
  planProxy,
} from "./cluster-plan.js";

export interface ClusterMember {
  readonly name: string;
  readonly url: string;
  readonly backend: string | null;
  readonly sideChannel?: SideChannelAddress | null | undefined;
  /** Undefined with the memory transport, where all servers run in this process. */
  readonly process?: Pick<SupervisedServer, "pid" | "replaced"> | undefined;
}

export interface StartOptions {
  readonly log: Log;
  readonly logLevel: LogLevel;
  readonly restart?: boolean | undefined;
  readonly proxyPort?: number | undefined;
  readonly trace?: string | undefined;
}

export interface Cluster extends AsyncDisposable {
  readonly proxy: ClusterMember;
  readonly prefills: readonly ClusterMember[];
  readonly decodes: readonly ClusterMember[];
  /** Ends all servers; no process, listener or timer is left. */
  close(): Promise<void>;
}

/**
 * Starts a cluster.
 * @throws The first error of a server; what was started is closed then.
 */
export async function startCluster(options: ClusterOptions, start: StartOptions): Promise<Cluster> {
  const closers = new CloseStack(start.log);
  const close = () => closers.close();
  try {
    const members =
      options.transport === "memory" || !(await crossesProcesses(options, start))
        ? await startInThisProcess(options, start, closers)
        : await startProcesses(options, start, closers);
    return { ...members, close, [Symbol.asyncDispose]: close };
  } catch (error) {
    await close();
    throw error;
  }
}

async function crossesProcesses(
  { transportModule }: ClusterOptions,
  { log }: StartOptions,
): Promise<boolean> {
  if (transportModule === undefined) return true;
  const transport = await openTransport(transportModule, { log });
  await transport.close();
  return transport.capabilities.crossProcess;
}

/**
 * A transport that reaches no other process: all instances run in this one, with the same HTTP and
 * handshakes.
 */
async function startInThisProcess(
  options: ClusterOptions,
  start: StartOptions,
  closers: CloseStack,
) {
  const { log, trace } = start;
  const { transportModule } = options;
  const network = memoryNetwork();
  const tracerOf = async (service: string, instance: string) => {
    const traces = await openTracer(trace, { service, instance, log });
    closers.add(`spans of ${instance}`, () => traces.close());
    return traces.tracer;
  };
  const startOne = async ({ name, config }: PlannedInstance): Promise<ClusterMember> => {
    const instance = await startInstance(readInstanceConfig(config), {
      log,
      tracer: await tracerOf("kv-demo", name),
      ...(transportModule === undefined
        ? {
            transport: memoryTransport({ network, host: name, memoryTypes: ["DRAM", "VRAM"] }),
            sideChannel: memorySideChannel({ network, host: name }),
          }
        : {
            transport: await openTransport(transportModule, { log }),
            sideChannel: zmqSideChannel({ log }),
          }),
    });
    closers.add(name, () => instance.drain());
    const { url, backend, sideChannel } = instance;
    return { name, url, backend, sideChannel };
  };
  const planned = planInstances(options);
  const prefills = await Promise.all(planned.prefills.map(startOne));
  const decodes = await Promise.all(planned.decodes.map(startOne));
  const settings = planProxy(prefills, decodes, options);
  const server = createProxy({
    ...(transportModule === undefined ? withoutPairing(settings, log) : { ...settings, log }),
    tracer: await tracerOf("kv-proxy", "proxy"),
  });
  closers.add("proxy", () => server.close());
  const { url } = await server.listen({ port: start.proxyPort ?? 0 });
  return { proxy: { name: "proxy", url, backend: null }, prefills, decodes };
}

/**
 * Settings of a proxy of instances on the memory network. Their side channels are in this process,
 * and a proxy reads side channels over TCP: it checks no pairs, and only push needs the addresses
 * of P. That these instances fit is known, so the warning of it is not for the reader.
 */
function withoutPairing(settings: ProxySettingsInput, log: Log) {
  const { prefillers = [], decoders = [], mode } = settings;
  const urls = (specs: typeof decoders) =>
    specs.map((spec) => (typeof spec === "string" ? spec : spec.url));
  return {
    ...settings,
    prefillers: mode === "push" ? prefillers : urls(prefillers),
    decoders: urls(decoders),
    pairing: { mode: "off" } as const,
    log: {
      ...log,
      warn: (...[event, fields]: Parameters<Log["warn"]>) =>
        event === "pairing-off" ? log.debug(event, fields) : log.warn(event, fields),
    },
  };
}

async function startProcesses(options: ClusterOptions, start: StartOptions, closers: CloseStack) {
  const { log, logLevel, restart = false, trace, proxyPort } = start;
  const startOne = async (
    role: "instance" | "proxy",
    { name, config }: { name: string; config: object },
    firstPort = 0,
  ): Promise<ClusterMember> => {
    const argumentsFor = (before?: Pick<Child, "port" | "sideChannel">) => {
      const port = before?.port ?? firstPort;
      const sideChannelPort = before?.sideChannel?.port;
      const settings = JSON.stringify({ sideChannelPort, ...config, port });
      const traced = trace === undefined ? [] : ["--trace", trace];
      return [role, "--log-level", logLevel, "--config", settings, ...traced];
    };
    const server = await SupervisedServer.start({
      start: (before) => startChild({ name, args: argumentsFor(before) }),
      restart: () => restart && !closers.isClosing,
      log,
    });
    closers.add(name, () => server.stop());
    const { url, backend, sideChannel } = server;
    return { name, url, backend, sideChannel, process: server };
  };
  const startAll = (planned: readonly PlannedInstance[]) =>
    Promise.allSettled(planned.map((instance) => startOne("instance", instance)));
  const planned = planInstances(options);
  // All processes have started or failed before one is stopped, so that none is left behind.
  const settled = await Promise.all([startAll(planned.prefills), startAll(planned.decodes)]);
  const [prefills, decodes] = [fulfilled(settled[0]), fulfilled(settled[1])];
  const config = planProxy(prefills, decodes, options);
  const proxy = await startOne("proxy", { name: "proxy", config }, proxyPort);
  return { proxy, prefills, decodes };
}

function fulfilled(results: readonly PromiseSettledResult<ClusterMember>[]): ClusterMember[] {
  return results.map((result) => {
    if (result.status === "rejected") throw result.reason;
    return result.value;
  });
}
