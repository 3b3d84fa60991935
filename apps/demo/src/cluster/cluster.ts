import { type LogLevel, openTracer } from "@kv/fleet/front-end";
import type { Log } from "@kv/interface";
import { createProxy, type ProxySettingsInput } from "@kv/proxy";
import { zmqSideChannel } from "@kv/side-channel";
import { memoryNetwork, memorySideChannel, memoryTransport } from "@kv/transport-memory";
import { CloseStack } from "../instance/close-stack.js";
import type { SideChannelAddress } from "../instance/engine-rank.js";
import { startInstance } from "../instance/instance.js";
import { readInstanceConfig } from "../instance/instance-config.js";
import { openTransport } from "../instance/modules.js";
import { SupervisedServer } from "../processes/child-process.js";
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
  /** Undefined where all servers run in this process. */
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
  close(): Promise<void>;
}

/**
 * Each server runs in a process of its own, or all in this one over a transport that reaches no
 * other.
 * @throws The first error of a server; what was started is closed then.
 */
export async function startCluster(options: ClusterOptions, start: StartOptions): Promise<Cluster> {
  const closers = new CloseStack(start.log);
  const close = () => closers.close();
  try {
    const startAll = (await crossesProcesses(options, start)) ? startProcesses : startInThisProcess;
    const members = await startAll(options, start, closers);
    return { ...members, close, [Symbol.asyncDispose]: close };
  } catch (error) {
    await close();
    throw error;
  }
}

async function crossesProcesses(
  { transport: name, transportModule }: ClusterOptions,
  { log }: StartOptions,
): Promise<boolean> {
  if (transportModule === undefined) return name !== "memory";
  const transport = await openTransport(transportModule, { log });
  await transport.close();
  return transport.capabilities.crossProcess;
}

async function startInThisProcess(
  options: ClusterOptions,
  { log, trace, proxyPort = 0 }: StartOptions,
  closers: CloseStack,
) {
  const { transportModule } = options;
  const network = memoryNetwork();
  const tracerOf = async (service: string, instance: string) => {
    const traces = await openTracer(trace, { service, instance, log });
    closers.add(`spans of ${instance}`, () => traces.close());
    return traces.tracer;
  };
  const startOne = async ({ name, config }: PlannedInstance): Promise<ClusterMember> => {
    const hostOptions = { network, host: name };
    const instance = await startInstance(readInstanceConfig(config), {
      log,
      tracer: await tracerOf("kv-demo", name),
      ...(transportModule === undefined
        ? {
            transport: memoryTransport({ ...hostOptions, memoryTypes: ["DRAM", "VRAM"] }),
            sideChannel: memorySideChannel(hostOptions),
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
  const settings = { ...planProxy(prefills, decodes, options), log };
  const server = createProxy({
    ...(transportModule === undefined ? withoutPairing(settings) : settings),
    tracer: await tracerOf("kv-proxy", "proxy"),
  });
  closers.add("proxy", () => server.close());
  const { url } = await server.listen({ port: proxyPort });
  return { proxy: { name: "proxy", url, backend: null }, prefills, decodes };
}

/**
 * The side channels of a memory network are in this process, and a proxy reads side channels over
 * TCP: it checks no pairs, and only push needs the addresses of P. The warning of that is not for
 * the reader.
 */
function withoutPairing<T extends ProxySettingsInput & { readonly log: Log }>(settings: T): T {
  const { prefillers = [], decoders = [], mode, log } = settings;
  const urls = (specs: typeof decoders) =>
    specs.map((spec) => (typeof spec === "string" ? spec : spec.url));
  return {
    ...settings,
    prefillers: mode === "push" ? prefillers : urls(prefillers),
    decoders: urls(decoders),
    pairing: { mode: "off" },
    log: {
      ...log,
      warn: (...[event, fields]: Parameters<Log["warn"]>) =>
        event === "pairing-off" ? log.debug(event, fields) : log.warn(event, fields),
    },
  };
}

async function startProcesses(
  options: ClusterOptions,
  { log, logLevel, restart = false, trace, proxyPort = 0 }: StartOptions,
  closers: CloseStack,
) {
  const startOne = async (
    role: "instance" | "proxy",
    { name, config }: { name: string; config: object },
    firstPort = 0,
  ): Promise<ClusterMember> => {
    const server = await SupervisedServer.start({
      name,
      argumentsFor(before) {
        const port = before?.port ?? firstPort;
        const sideChannelPort = before?.sideChannel?.port;
        const settings = JSON.stringify({ sideChannelPort, ...config, port });
        const traced = trace === undefined ? [] : ["--trace", trace];
        return [role, "--log-level", logLevel, "--config", settings, ...traced];
      },
      restart: () => restart && !closers.isClosing,
      log,
    });
    closers.add(name, () => server.stop());
    const { url, backend, sideChannel } = server.ready;
    return { name, url, backend, sideChannel, process: server };
  };
  const startAll = (planned: readonly PlannedInstance[]) =>
    Promise.allSettled(planned.map((instance) => startOne("instance", instance)));
  const planned = planInstances(options);
  // All processes have started or failed before one is stopped, so that none is left behind.
  const settled = await Promise.all([startAll(planned.prefills), startAll(planned.decodes)]);
  const [prefills = [], decodes = []] = settled.map(fulfilled);
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
