import { reportOfChecks, runInChild } from "@kv/program";
import { DEFAULT_BACKEND, notifies } from "../backends/backend-traits.js";
import { childTask } from "../child/child-task.js";
import type { Environment } from "../environment.js";
import { realHost } from "../host.js";
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
import { pluginChecks } from "./checks/plugins.js";
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
  ]);
  const { environment = process.env } = options;
  const host = realHost();
  const timeoutMs = timerMs(options.timeoutMs ?? TIMEOUT_MS, "KV_CONFIG_INVALID") ?? MAX_TIMER_MS;
  const requested = requestedBackends(environment, options);
  const { check: library, located } = await libraryCheck(host, environment, options.library);
  const env =
    located === undefined ? environment : { ...environment, KV_NIXL_LIBRARY: located.path };
  const probe = (task: string, args: readonly string[], more: Environment = {}) =>
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
    if (obstacle === undefined) {
      const { args, env: selecting } = requested.selectInProbe(name);
      const outcome = await probe("probe-backend", args, selecting);
      backends.push(backendCheck(name, outcome), ...repairChecks(name, outcome));
    } else {
      const check = finding("library", `backend.${name}`, `backend ${name}`);
      backends.push(check("note", `not tested: ${obstacle}`));
    }
    if (options.pair === false) continue;
    const starts = backends.some(
      ({ id, status }) => id === `library.backend.${name}` && status === "ok",
    );
    const protocols = name === DEFAULT_BACKEND ? PAIR_ENVIRONMENT : {};
    if (starts && notifies([{ name }]))
      pairs.push(...pairChecks(name, await probe("probe-pair", [name], protocols)));
    else {
      const why = obstacle ?? (starts ? STORAGE_ONLY : "the backend does not start");
      pairs.push(finding("pair", name, `two processes, ${name}`)("note", `not tested: ${why}`));
    }
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
