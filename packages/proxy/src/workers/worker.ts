import { type InstancePool, instanceName, type Role } from "@kv/fleet";
import type { InstanceChange } from "@kv/fleet/front-end";
import type { Clock } from "@kv/interface";
import type { PrefillDecodeProxy, ProxyStatus, SharedByWorkers } from "../proxy.js";
import { Calls } from "./calls.js";
import { type Changed, replay } from "./instance-changes-log.js";

/** What a worker is told at its start. */
export interface WorkerStart {
  readonly port: number;
  /** What operators have changed before. */
  readonly changes: readonly Changed[];
}

/** What a worker answers when it serves. */
export interface WorkerStarted {
  readonly url: string;
  /** Names of the instances, as in the line that the program prints. */
  readonly prefill: string;
  readonly decode: string;
}

export interface WorkerOptions {
  readonly host: string;
  readonly create: (shared: SharedByWorkers) => PrefillDecodeProxy;
  /** Called after the proxy has closed. */
  readonly closed: () => Promise<void>;
  readonly clock: Clock;
}

/** Requests in flight by the name of their instance, with its role before it. */
export type Loads = Readonly<Record<string, number>>;

/** Between two messages about a worker's load. */
const LOADS_MS = 100;

/**
 * Serves clients as one of several workers. Signals are the primary's: a terminal sends Ctrl-C to
 * all processes.
 */
export function serveAsWorker({ host, create, closed, clock }: WorkerOptions): void {
  for (const signal of ["SIGTERM", "SIGINT"] as const) process.on(signal, () => {});
  let started: Promise<PrefillDecodeProxy> | undefined;
  const running = async () => {
    if (started === undefined) throw new Error("the worker was not started");
    return await started;
  };
  const calls = new Calls((message) => process.send?.(message), {
    async start({ port, changes }: WorkerStart): Promise<WorkerStarted> {
      const proxy = create({
        status: () => calls.call<ProxyStatus>("status"),
        changeInstance: (change, body) => calls.call<object>("changeInstance", { change, body }),
        objects: (call) => calls.call("objects", call),
      });
      replay(changes, proxy.instances);
      const listening = proxy.listen({ host, port });
      started = listening.then(() => proxy);
      started.catch(() => {});
      const { url } = await listening;
      tellLoads(calls, proxy, clock);
      return { url, ...instanceNames(proxy) };
    },
    report: async () => (await running()).report(),
    metrics: async () => (await running()).metricsAsJson(),
    async changeInstance({
      change,
      body,
    }: {
      readonly change: InstanceChange;
      readonly body: unknown;
    }) {
      return await (await running()).changeInstance(change, body);
    },
    async loadsElsewhere(loads: Loads) {
      const { instances } = await running();
      for (const pool of Object.values(instances))
        for (const one of pool.list()) one.inFlightElsewhere = loads[loadKey(pool, one)] ?? 0;
    },
    async close(options: { readonly graceMs?: number }) {
      await (await running()).close(options);
      await closed();
      setImmediate(() => process.disconnect());
    },
  });
  process.on("message", (message) => calls.receive(message));
  calls.tell("listening", undefined);
}

/** The names of the instances of both roles. */
export function instanceNames({
  instances,
}: Pick<PrefillDecodeProxy, "instances">): Omit<WorkerStarted, "url"> {
  const names = (role: Role) => instances[role].list().map(instanceName).join(" ");
  return { prefill: names("prefill"), decode: names("decode") };
}

function loadKey({ role }: InstancePool, instance: Parameters<typeof instanceName>[0]): string {
  return `${role} ${instanceName(instance)}`;
}

/** Tells the primary this worker's load while it changes. */
function tellLoads(calls: Calls, { instances }: PrefillDecodeProxy, clock: Clock): void {
  let last = "{}";
  const tell = () => {
    const loads: Record<string, number> = {};
    for (const pool of Object.values(instances))
      for (const one of pool.list())
        if (one.ownInFlight > 0) loads[loadKey(pool, one)] = one.ownInFlight;
    const text = JSON.stringify(loads);
    if (text !== last) calls.tell("loads", loads);
    last = text;
    clock.setTimer(tell, LOADS_MS);
  };
  tell();
}
