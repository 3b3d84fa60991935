import { openTracer } from "@kv/fleet/front-end";
import { type Ambient, KvError } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { endWithOwner, onInterrupt, print, printError, sendToOwner } from "@kv/program";
import { createProxy, type ProxySettingsInput } from "@kv/proxy";
import { zmqSideChannel } from "@kv/side-channel";
import { defined } from "../defined.js";
import { startInstance } from "../instance/instance.js";
import { readInstanceConfig } from "../instance/instance-config.js";
import { openTransport } from "../instance/modules.js";
import type { ReadyServer } from "./child-process.js";
import { jsonLog, type LogLevel } from "./json-log.js";
import { parseJson } from "./parse-json.js";

export interface ServerFlags {
  readonly config?: string | undefined;
  readonly port?: number | undefined;
  readonly logLevel: LogLevel;
  readonly trace?: string | undefined;
  /** Started by the demo, which gets the outcome over IPC. */
  readonly child?: boolean | undefined;
}

/**
 * Options of `prefill`, `decode` and `instance`. The options are settings of an instance, and come
 * before those of `config`.
 */
export interface InstanceFlags extends ServerFlags {
  readonly kvTransferConfig?: string | undefined;
  readonly extraConfig?: string | undefined;
  readonly [setting: string]: unknown;
}

/** Options of `proxy`, which come before the settings of `config`. */
export interface ProxyFlags extends ServerFlags {
  readonly prefill?: readonly string[] | undefined;
  readonly decode?: readonly string[] | undefined;
  readonly mode?: ProxySettingsInput["mode"] | undefined;
  readonly adminPort?: number | undefined;
}

/** Runs one prefill or decode server over NIXL in this process. `role`: that of the command. */
export async function runInstance(
  role: "prefill" | "decode" | undefined,
  flags: InstanceFlags,
): Promise<void> {
  const settings = readInstanceConfig(instanceSettings(role, flags));
  const place = { service: "kv-demo", instance: settings.name ?? settings.role };
  await runServer(flags, place, async ({ log, tracer }) => {
    const instance = await startInstance(settings, {
      log,
      tracer,
      transport:
        settings.transportModule === undefined
          ? nixlTransport({ log })
          : await openTransport(settings.transportModule, { log }),
      sideChannel: zmqSideChannel({ log }),
    });
    const { url, port, backend, engineIds, sideChannel } = instance;
    const shown = { engine_ids: engineIds, config: instance.settings };
    return { url, port, backend, sideChannel, shown, drain: () => instance.drain() };
  });
}

/**
 * The settings of an instance from the options of its command.
 * @throws `KV_CONFIG_INVALID`.
 */
export function instanceSettings(
  role: "prefill" | "decode" | undefined,
  {
    config,
    kvTransferConfig,
    extraConfig,
    logLevel: _,
    child: __,
    trace: ___,
    ...options
  }: InstanceFlags,
): Record<string, unknown> {
  const given = configOf({ config });
  const usual: Record<string, unknown> = {
    kv_connector: "NixlConnector",
    kv_role: role === "prefill" ? "kv_producer" : role === "decode" ? "kv_consumer" : "kv_both",
  };
  const transferConfig =
    kvTransferConfig === undefined
      ? ((given.kvTransferConfig as Record<string, unknown> | undefined) ?? usual)
      : parseJson("--kv-transfer-config", kvTransferConfig);
  const extra =
    extraConfig === undefined
      ? {}
      : {
          kv_connector_extra_config: {
            ...(transferConfig.kv_connector_extra_config as object | undefined),
            ...parseJson("--extra-config", extraConfig),
          },
        };
  return {
    ...(role === undefined ? {} : { role }),
    ...given,
    ...options,
    kvTransferConfig: { ...transferConfig, ...extra },
  };
}

function configOf({ config }: Pick<ServerFlags, "config">): Record<string, unknown> {
  return config === undefined ? {} : parseJson("--config", config);
}

export async function runProxy(flags: ProxyFlags): Promise<void> {
  const given = configOf(flags) as ProxySettingsInput & { port?: number };
  const { port = 0, ...settings } = { ...given, ...defined({ port: flags.port }) };
  const { prefill, decode, mode, adminPort } = flags;
  const resolved: ProxySettingsInput = {
    ...settings,
    ...defined({
      prefillers: prefill && [...prefill],
      decoders: decode && [...decode],
      mode,
      admin: adminPort === undefined ? undefined : { ...settings.admin, port: adminPort },
    }),
  };
  await runServer(flags, { service: "kv-proxy", instance: "proxy" }, async (ambient) => {
    const proxy = createProxy({ ...resolved, ...ambient });
    const address = await proxy.listen({ port });
    const shown = { config: { ...resolved, port: address.port } };
    return { ...address, backend: null, sideChannel: null, shown, drain: () => proxy.close() };
  });
}

interface Server extends ReadyServer {
  readonly shown: object;
  drain(): Promise<void>;
}

/** Time for the process to end by itself after its server was closed. */
const EXIT_TIMEOUT_MS = 2000;

/**
 * Runs a server until SIGTERM or SIGINT, which drain it; a second signal ends the process at once.
 * A child of the demo reports over IPC and ends when its parent is gone: the channel closes even
 * when the parent is killed. A process that a user started prints one line of JSON, with the
 * settings in effect.
 */
async function runServer(
  { child: isChild = false, logLevel, trace }: ServerFlags,
  { service, instance }: { readonly service: string; readonly instance: string },
  start: (ambient: Pick<Ambient, "log" | "tracer">) => Promise<Server>,
): Promise<void> {
  const log = jsonLog(logLevel, { instance, pid: process.pid });
  const traces = await openTracer(trace, { service, instance, log });
  // Before anything is opened: the parent may end while its child starts.
  endWithOwner();
  // The channel of `npm run demo` must not keep this process alive after an error.
  if (!isChild) process.channel?.unref();
  let stopping: Promise<void> | undefined;
  let server: Server | undefined;
  const stop = () => {
    if (stopping !== undefined || server === undefined) process.exit(1);
    stopping = drain(server).then(
      () => exit(0),
      (error: unknown) => {
        printError(`${String(error)}\n`);
        exit(1);
      },
    );
  };
  async function drain(running: Server): Promise<void> {
    try {
      await running.drain();
    } finally {
      await traces.close();
    }
  }
  process.on("SIGTERM", stop);
  // Ctrl-C reaches all processes of a terminal. The demo stops its servers itself.
  if (isChild) process.on("SIGINT", () => {});
  else onInterrupt(stop);
  try {
    server = await start({ log, tracer: traces.tracer });
  } catch (error) {
    const { code, message, hint } = KvError.from(error, "KV_INTERNAL", "the server did not start");
    if (!isChild) throw error;
    await sendToOwner({ error: { code, message, hint } });
    exit(1);
    return;
  }
  const { url, port, backend, sideChannel, shown } = server;
  if (isChild)
    await sendToOwner({ value: { url, port, backend, sideChannel } satisfies ReadyServer });
  else print(`${JSON.stringify({ ready: true, url, port, backend, ...shown })}\n`);
}

/**
 * Closes the channel to the parent, which keeps the process alive, so that the process ends when
 * everything is closed.
 */
function exit(code: number): void {
  process.exitCode = code;
  process.removeAllListeners("disconnect");
  if (process.connected) process.disconnect();
  setTimeout(() => process.exit(code), EXIT_TIMEOUT_MS).unref();
}
