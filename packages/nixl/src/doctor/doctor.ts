import { DEFAULT_BACKEND, notifies } from "../backends/backend-traits.js";
import { describePlugins, pluginFolder } from "../backends/plugins.js";
import { runInChild } from "../child/run-in-child.js";
import type { Environment } from "../library/find-library.js";
import { gpuMemoryChecks } from "./checks/gpu-memory.js";
import { backendCheck, libraryCheck, runtimeChecks, STORAGE_ONLY } from "./checks/library.js";
import { machineChecks, rdmaDevices } from "./checks/machine.js";
import { PAIR_ENVIRONMENT, pairChecks } from "./checks/pair.js";
import { pluginCheck } from "./checks/plugins.js";
import { choiceOf } from "./checks/requested-backends.js";
import { variableChecks } from "./checks/variables.js";
import { type Host, realHost } from "./host.js";
import { type Check, type DoctorReport, reportOf } from "./report.js";

export interface DoctorOptions {
  /** As of `nixlTransport`. */
  readonly library?: string;
  readonly backends?: readonly string[];
  /** Move bytes between two processes; true by default. */
  readonly pair?: boolean;
  /** Longest that one probe may take, in another process each; 60 s by default. */
  readonly timeoutMs?: number;
  readonly environment?: Environment;
  readonly host?: Host;
}

const TIMEOUT_MS = 60_000;

/**
 * Looks at everything that decides whether NIXL works here, and how fast. Whatever may crash or hang is tried in a process of its own.
 * It does not throw for what it finds.
 */
export async function doctor(options: DoctorOptions = {}): Promise<DoctorReport> {
  const { environment = process.env, host = realHost(), timeoutMs = TIMEOUT_MS } = options;
  const { backends, check: choice, askFor } = choiceOf(environment, options);
  const { check: library, located } = await libraryCheck(host, environment, options.library);
  const env = located === undefined ? environment : { ...environment, KV_NIXL_LIBRARY: located.path };
  const probe = (task: string, args: readonly string[], more: Environment = {}) =>
    runInChild(task, args, { timeoutMs, env: { ...env, ...more } });

  const runtime = runtimeChecks(host, await probe("probe-runtime", []));
  const addonLoads = runtime.every(({ status }) => status !== "fail");
  const plugins: Check[] = [];
  const missing: Check[] = [];
  const ready: Check[] = [];
  const devices: Check[] = [];
  const pairs: Check[] = [];
  if (located !== undefined) {
    const described = await describePlugins({ libraryPath: located.path, environment });
    const hasEfa = rdmaDevices(host).some(({ efa }) => efa);
    for (const plugin of described) {
      const { name } = plugin;
      plugins.push(
        pluginCheck(plugin, { chosen: backends.includes(name), wanted: hasEfa && name === "LIBFABRIC" }),
      );
    }
    const names = described.map(({ name }) => name);
    for (const name of backends.filter((backend) => !names.includes(backend))) {
      missing.push(noPlugin(name, pluginFolder(located.path, environment), names));
    }
    if (backends.includes(DEFAULT_BACKEND)) {
      devices.push(...(await gpuMemoryChecks({ host, environment, libraryPath: located.path })));
    }
  }
  const usable = (name: string) =>
    plugins.some((plugin) => plugin.id === `plugins.${name}` && plugin.status === "ok");
  for (const name of backends) {
    const why = !addonLoads
      ? "the addon does not load"
      : located === undefined
        ? "there is no NIXL that loads"
        : "its plugin does not load";
    if (!addonLoads || located === undefined || !usable(name)) {
      ready.push(notTried(`library.backend.${name}`, "library", `backend ${name}`, why));
      if (options.pair !== false) pairs.push(notTried(`pair.${name}`, "pair", `two processes, ${name}`, why));
      continue;
    }
    const { args, env: asking } = askFor(name);
    const backend = backendCheck(name, await probe("probe-backend", args, asking));
    ready.push(backend);
    if (options.pair === false) continue;
    if (!notifies([{ name }])) {
      pairs.push(notTried(`pair.${name}`, "pair", `two processes, ${name}`, STORAGE_ONLY));
    } else if (backend.status === "ok") {
      const more = name === DEFAULT_BACKEND ? PAIR_ENVIRONMENT : {};
      pairs.push(...pairChecks(name, await probe("probe-pair", [name], more)));
    } else
      pairs.push(notTried(`pair.${name}`, "pair", `two processes, ${name}`, "the backend does not start"));
  }
  return reportOf([
    ...runtime,
    library,
    ...ready,
    ...devices,
    ...missing,
    ...plugins,
    ...machineChecks(host, backends),
    choice,
    ...(backends.length === 0 ? [] : variableChecks(environment, options)),
    ...pairs,
  ]);
}

function noPlugin(name: string, folder: string, found: readonly string[]): Check {
  return {
    id: `plugins.${name}`,
    area: "plugins",
    title: name,
    status: "fail",
    found: `chosen, and there is no libplugin_${name}.so in ${folder}; there are ${found.join(", ") || "none"}`,
    fix: "choose another backend, or an installation of NIXL that has it",
  };
}

function notTried(id: string, area: Check["area"], title: string, why: string): Check {
  return { id, area, title, status: "note", found: `not tried: ${why}` };
}
