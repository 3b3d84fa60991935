import { type InstancePool, type InstanceStatus, instanceName, type Role } from "@kv/fleet";
import {
  type InstanceChange,
  type JsonLog,
  jsonLog,
  type MetricAsJson,
  type NamedInstance,
  type Reloaded,
} from "@kv/fleet/front-end";
import type { Clock } from "@kv/interface";
import { printError } from "@kv/program";
import type { BirpcReturn } from "birpc";
import type { CliOptions } from "../config/cli-options.js";
import type { PrefillDecodeProxy, SharedByWorkers, WorkerReport } from "../proxy.js";
import { type ObjectCall, objectsByCalls } from "../readback/object-store.js";
import { callsOver } from "./calls.js";
import { workerSettings } from "./limits-share.js";
import { warmUp } from "./warm-up.js";

export interface WorkerStart {
  /** Those that the primary has, whatever the file says by now. */
  readonly options: CliOptions;
  readonly port: number;
  readonly changes: readonly Changed[];
}

export interface WorkerStarted {
  readonly url: string;
  /** Instance names as in the program's ready line. */
  readonly prefill: string;
  readonly decode: string;
}

interface WorkerProxy {
  readonly proxy: PrefillDecodeProxy;
  readonly log: JsonLog;
  readonly closed: () => Promise<void>;
}

/** Requests in flight by role and instance name. */
export type Loads = Readonly<Record<string, number>>;

/** What a worker asks its primary, and tells it. */
export interface PrimaryCalls extends Omit<SharedByWorkers, "objects"> {
  listening(): void;
  loads(loads: Loads): void;
  objects(call: ObjectCall): unknown;
}

/** What a primary asks its workers, and tells them. */
export interface WorkerCalls {
  warmUp(options: CliOptions): Promise<void>;
  start(start: WorkerStart): Promise<WorkerStarted>;
  reload(options: CliOptions): Promise<Reloaded>;
  report(): Promise<WorkerReport>;
  metrics(): Promise<MetricAsJson[]>;
  changeInstance(change: InstanceChange, body: unknown): Promise<InstanceStatus[]>;
  loadsElsewhere(loads: Loads): Promise<void>;
  close(options: { readonly graceMs?: number }): Promise<void>;
}

/** Interval of the messages about a worker's load. */
const LOADS_MS = 100;

/**
 * Serves clients as one of several workers. The primary handles signals, because a terminal sends
 * Ctrl-C to all processes.
 */
export function serveAsWorker(
  create: (options: CliOptions, shared: SharedByWorkers) => Promise<WorkerProxy>,
  clock: Clock,
): void {
  for (const signal of ["SIGTERM", "SIGHUP", "SIGINT"] as const) process.on(signal, () => {});
  let started: Promise<WorkerProxy> | undefined;
  const ofWorker = async () => {
    if (started === undefined) throw new Error("the worker was not started");
    return await started;
  };
  const running = async () => (await ofWorker()).proxy;
  const startProxy = async ({ options, port, changes }: WorkerStart) => {
    const { status, changeInstance } = primary;
    const objects = objectsByCalls((call) => primary.objects(call));
    const created = await create(options, { status, changeInstance, objects });
    replay(changes, created.proxy.instances);
    const { url } = await created.proxy.listen({ host: options.host, port });
    return { created, url };
  };
  const own: WorkerCalls = {
    warmUp: (options) => warmUp(options, jsonLog(options.logLevel, { write: printError })),
    async start(start) {
      const starting = startProxy(start);
      started = starting.then(({ created }) => created);
      started.catch(() => {});
      const { created, url } = await starting;
      tellLoads(primary, created.proxy, clock);
      return { url, ...instanceNames(created.proxy) };
    },
    async reload({ settings, workers, logLevel }) {
      const { proxy, log } = await ofWorker();
      const reloaded = proxy.reload(workerSettings(settings, workers));
      log.setLevel(logLevel);
      return reloaded;
    },
    report: async () => (await running()).report(),
    metrics: async () => (await running()).metricsAsJson(),
    changeInstance: async (change, body) => (await running()).changeInstance(change, body),
    async loadsElsewhere(loads) {
      const { instances } = await running();
      for (const pool of Object.values(instances))
        for (const one of pool.list()) one.inFlightElsewhere = loads[loadKey(pool, one)] ?? 0;
    },
    async close(options) {
      const { proxy, closed } = await ofWorker();
      await proxy.close(options);
      await closed();
      setImmediate(() => process.disconnect());
    },
  };
  const primary = callsOver<PrimaryCalls, WorkerCalls>(own, {
    post: (message) => process.send?.(message),
    on: (receive) => void process.on("message", receive),
  });
  void primary.listening.asEvent();
}

export function instanceNames({
  instances,
}: Pick<PrefillDecodeProxy, "instances">): Omit<WorkerStarted, "url"> {
  const names = (role: Role) => instances[role].list().map(instanceName).join(" ");
  return { prefill: names("prefill"), decode: names("decode") };
}

function loadKey({ role }: InstancePool, instance: Parameters<typeof instanceName>[0]): string {
  return `${role} ${instanceName(instance)}`;
}

function tellLoads(
  primary: BirpcReturn<PrimaryCalls, WorkerCalls>,
  { instances }: PrefillDecodeProxy,
  clock: Clock,
): void {
  let last = "{}";
  const tell = () => {
    const loads: Record<string, number> = {};
    for (const pool of Object.values(instances))
      for (const one of pool.list())
        if (one.ownInFlight > 0) loads[loadKey(pool, one)] = one.ownInFlight;
    const text = JSON.stringify(loads);
    if (text !== last) void primary.loads.asEvent(loads);
    last = text;
    clock.setTimer(tell, LOADS_MS);
  };
  tell();
}

export interface Changed extends NamedInstance {
  readonly change: InstanceChange;
  /** Added after the start, so a new worker does not know it. */
  readonly added: boolean;
}

/** Operators' changes since the start, for workers that start later. */
export class InstanceChangesLog {
  readonly #changed = new Map<string, Changed>();

  record(change: InstanceChange, { role, spec }: NamedInstance): void {
    const key = `${role} ${instanceName(spec)}`;
    const before = this.#changed.get(key);
    const known = before !== undefined && before.change !== "remove" ? before : undefined;
    if (change === "remove" && before?.added === true) this.#changed.delete(key);
    else {
      const added = change === "add" || known?.added === true;
      this.#changed.set(key, { change, role, spec: known?.spec ?? spec, added });
    }
  }

  list(): readonly Changed[] {
    return [...this.#changed.values()];
  }
}

function replay(changes: readonly Changed[], pools: Readonly<Record<Role, InstancePool>>): void {
  for (const { change, role, spec, added } of changes) {
    const pool = pools[role];
    if (added && pool.find(spec) === undefined) pool.add(spec);
    if (change === "add" || pool.find(spec) === undefined) continue;
    pool[change](spec).catch(() => {});
  }
}
