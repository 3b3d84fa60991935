import { type ChildOutcome, reportOfChecks, runInChild } from "@kv/program";
import { DEFAULT_BACKEND, notifies } from "../backends/backend-traits.js";
import { describePlugins, pluginFolder } from "../backends/plugins.js";
import { rdmaDevices } from "../backends/rdma-devices.js";
import { childTask } from "../child/child-task.js";
import type { Environment } from "../environment.js";
import { type Host, realHost } from "../host.js";
import type { Check, DoctorReport } from "../reports.js";
import { MAX_TIMER_MS, requireOptions, timerMs } from "../validate.js";
import { finding } from "./checks/finding.js";
import { gpuMemoryChecks } from "./checks/gpu-memory.js";
import {
  backendCheck,
  libraryCheck,
  repairChecks,
  runtimeChecks,
  STORAGE_ONLY,
} from "./checks/library.js";
import { machineChecks } from "./checks/machine.js";
import { PAIR_ENVIRONMENT, pairChecks } from "./checks/pair.js";
import { noPluginCheck, pluginCheck } from "./checks/plugins.js";
import { requestedBackends, variableChecks } from "./checks/variables.js";

/** Options of `doctor`. */
export interface DoctorOptions {
  /** Path of `libnixl_capi.so`. @default found as by `nixlTransport` */
  readonly library?: string | undefined;
  /** Backends to check. @default selected as by `nixlTransport` */
  readonly backends?: readonly string[] | undefined;
  /** Move bytes between two processes. @default true */
  readonly pair?: boolean | undefined;
  /** The longest that one probe may take; each runs in a process of its own. @default 60_000 */
  readonly timeoutMs?: number | undefined;
  /** The variables that apply. @default process.env */
  readonly environment?: Environment | undefined;
  /** The machine to check, for tests. @default this one */
  readonly host?: Host | undefined;
}

const TIMEOUT_MS = 60_000;

/**
 * Checks everything that decides whether NIXL works on this machine, and how fast: Node, the addon,
 * the library, plugins, the machine, variables, and transfers between two processes. Steps that may
 * crash or hang run in other processes. Problems are in the report and do not reject.
 */
export async function doctor(options: DoctorOptions = {}): Promise<DoctorReport> {
  requireOptions(options, "KV_CONFIG_INVALID", "the options of doctor", [
    "library",
    "backends",
    "pair",
    "timeoutMs",
    "environment",
    "host",
  ]);
  const { environment = process.env, host = realHost() } = options;
  const timeoutMs = timerMs(options.timeoutMs ?? TIMEOUT_MS, "KV_CONFIG_INVALID") ?? MAX_TIMER_MS;
  const requested = requestedBackends(environment, options);
  const { check: library, located } = await libraryCheck(host, environment, options.library);
  const env =
    located === undefined ? environment : { ...environment, KV_NIXL_LIBRARY: located.path };
  const probe: Probe = (task, args, more = {}) =>
    runInChild({ ...childTask(task, ...args), timeoutMs, env: { ...env, ...more } });

  const runtime = runtimeChecks(host, await probe("probe-runtime", []));
  const plugins =
    located === undefined
      ? []
      : await pluginChecks(located.path, requested.names, host, environment);
  const backends: Check[] = [];
  const pairs: Check[] = [];
  for (const name of requested.names) {
    const obstacle = runtime.some(({ status }) => status === "fail")
      ? "the addon does not load"
      : located === undefined
        ? "there is no NIXL that loads"
        : plugins.some(({ id, status }) => id === `plugins.${name}` && status === "ok")
          ? undefined
          : "its plugin does not load";
    if (obstacle !== undefined) {
      backends.push(notTested("library", `backend.${name}`, `backend ${name}`, obstacle));
      if (options.pair !== false) pairs.push(pairNotTested(name, obstacle));
      continue;
    }
    const { args, env: selecting } = requested.selectInProbe(name);
    const outcome = await probe("probe-backend", args, selecting);
    const backend = backendCheck(name, outcome);
    backends.push(backend, ...repairChecks(name, outcome));
    if (options.pair !== false) pairs.push(...(await pairProbe(name, backend, probe)));
  }
  const gpus =
    located !== undefined && requested.names.includes(DEFAULT_BACKEND)
      ? await gpuMemoryChecks({ host, environment, libraryPath: located.path })
      : [];
  return reportOfChecks([
    ...runtime,
    library,
    ...backends,
    ...gpus,
    ...plugins,
    ...machineChecks(host, requested.names),
    requested.check,
    ...(requested.names.length === 0 ? [] : variableChecks(environment, options)),
    ...pairs,
  ]);
}

type Probe = (task: string, args: readonly string[], more?: Environment) => Promise<ChildOutcome>;

/** Selected backends without a plugin come first. */
async function pluginChecks(
  libraryPath: string,
  selected: readonly string[],
  host: Host,
  environment: Environment,
): Promise<Check[]> {
  const plugins = await describePlugins({ libraryPath, environment });
  const names = plugins.map(({ name }) => name);
  const hasEfa = rdmaDevices(host).some(({ efa }) => efa);
  const absent = selected
    .filter((name) => !names.includes(name))
    .map((name) =>
      noPluginCheck(name, {
        libraryPath,
        folder: pluginFolder(libraryPath, environment),
        found: names,
      }),
    );
  const found = plugins.map((plugin) =>
    pluginCheck(plugin, {
      selected: selected.includes(plugin.name),
      wanted: hasEfa && plugin.name === "LIBFABRIC",
    }),
  );
  return [...absent, ...found];
}

async function pairProbe(name: string, backend: Check, probe: Probe): Promise<Check[]> {
  if (!notifies([{ name }])) return [pairNotTested(name, STORAGE_ONLY)];
  if (backend.status !== "ok") return [pairNotTested(name, "the backend does not start")];
  const environment = name === DEFAULT_BACKEND ? PAIR_ENVIRONMENT : {};
  return pairChecks(name, await probe("probe-pair", [name], environment));
}

const pairNotTested = (name: string, why: string): Check =>
  notTested("pair", name, `two processes, ${name}`, why);

function notTested(area: Check["area"], id: string, title: string, why: string): Check {
  return finding(area, id, title)("note", `not tested: ${why}`);
}
