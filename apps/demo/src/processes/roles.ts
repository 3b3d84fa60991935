import { jsonLog, type LogLevel, openTracer } from "@kv/fleet/front-end";
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

export interface ServerFlags {
  readonly config?: string | undefined;
  readonly port?: number | undefined;
  readonly logLevel: LogLevel;
  readonly trace?: string | undefined;
  /** Started by the demo, which gets the outcome over IPC. */
  readonly child?: boolean | undefined;
}

/** Settings of an instance, which come before those of `config`. */
export interface InstanceFlags extends ServerFlags {
  readonly kvTransferConfig?: string | undefined;
  readonly extraConfig?: string | undefined;
  readonly [setting: string]: unknown;
}

export interface ProxyFlags extends ServerFlags {
  readonly prefill?: string[] | undefined;
  readonly decode?: string[] | undefined;
  readonly mode?: ProxySettingsInput["mode"] | undefined;
  readonly adminPort?: number | undefined;
}

type Role = "prefill" | "decode" | undefined;

/** `role`: that of the command. */
export async function runInstance(role: Role, flags: InstanceFlags): Promise<void> {
  const settings = readInstanceConfig(instanceSettings(role, flags));
  const { transportModule } = settings;
  await runServer(flags, "kv-demo", settings.name ?? settings.role, async ({ log, tracer }) => {
    const instance = await startInstance(settings, {
      log,
      tracer,
      transport:
        transportModule === undefined
          ? nixlTransport({ log })
          : await openTransport(transportModule, { log }),
      sideChannel: zmqSideChannel({ log }),
    });
    const { url, port, backend, engineIds, sideChannel } = instance;
    const shown = { engine_ids: engineIds, config: instance.settings };
    const drain = () => instance.drain();
    return { ready: { url, port, backend, sideChannel }, shown, drain };
  });
}

export function instanceSettings(role: Role, flags: InstanceFlags): Record<string, unknown> {
  const {
    config,
    kvTransferConfig,
    extraConfig,
    logLevel: _,
    child: __,
    trace: ___,
    ...options
  } = flags;
  const { kvTransferConfig: inConfig, ...given } = parseJson("--config", config) ?? {};
  const usual = {
    kv_connector: "NixlConnector",
    kv_role: role === "prefill" ? "kv_producer" : role === "decode" ? "kv_consumer" : "kv_both",
  };
  const asked = parseJson("--kv-transfer-config", kvTransferConfig) ?? inConfig ?? usual;
  const transferConfig = { ...(asked as Record<string, unknown>) };
  const extra = parseJson("--extra-config", extraConfig);
  const inFile = transferConfig["kv_connector_extra_config"] as object | undefined;
  if (extra !== undefined) transferConfig["kv_connector_extra_config"] = { ...inFile, ...extra };
  return { ...(role && { role }), ...given, ...options, kvTransferConfig: transferConfig };
}

export function parseJson(
  option: string,
  text: string | undefined,
): Record<string, unknown> | undefined {
  if (text === undefined) return undefined;
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch (cause) {
    const message = `${option} is not JSON: ${(cause as Error).message}`;
    throw new KvError("KV_CONFIG_INVALID", message, { cause });
  }
  if (typeof value === "object" && value !== null && !Array.isArray(value))
    return value as Record<string, unknown>;
  throw new KvError("KV_CONFIG_INVALID", `${option} is ${text.slice(0, 100)}, not a JSON object`);
}

export async function runProxy(flags: ProxyFlags): Promise<void> {
  const { prefill, decode, mode, adminPort } = flags;
  const { port = 0, ...given } = (parseJson("--config", flags.config) ??
    {}) as ProxySettingsInput & { port?: number };
  const settings: ProxySettingsInput = {
    ...given,
    ...defined({
      prefillers: prefill,
      decoders: decode,
      mode,
      admin: adminPort === undefined ? undefined : { ...given.admin, port: adminPort },
    }),
  };
  await runServer(flags, "kv-proxy", "proxy", async (ambient) => {
    const proxy = createProxy({ ...settings, ...ambient });
    const address = await proxy.listen({ port: flags.port ?? port });
    const shown = { config: { ...settings, port: address.port } };
    const drain = () => proxy.close();
    return { ready: { ...address, backend: null, sideChannel: null }, shown, drain };
  });
}

interface Server {
  readonly ready: ReadyServer;
  readonly shown: object;
  drain(): Promise<void>;
}

const EXIT_TIMEOUT_MS = 2000;

/**
 * Runs a server until SIGTERM or SIGINT, which drain it; a second signal ends the process at once.
 * A child of the demo reports over IPC and ends when its parent is gone. A process that a user
 * started prints one line of JSON, with the settings in effect.
 */
async function runServer(
  { child: isChild = false, logLevel, trace }: ServerFlags,
  service: string,
  instance: string,
  start: (ambient: Pick<Ambient, "log" | "tracer">) => Promise<Server>,
): Promise<void> {
  const log = jsonLog(logLevel, { write: printError }, { instance, pid: process.pid });
  const traces = await openTracer(trace, { service, instance, log });
  // Before anything is opened: the parent may end while its child starts.
  endWithOwner();
  // The channel of `npm run demo` must not keep this process alive after an error.
  if (!isChild) process.channel?.unref();
  let isStopping = false;
  let server: Server | undefined;
  async function stop(): Promise<void> {
    if (isStopping || server === undefined) process.exit(1);
    isStopping = true;
    try {
      await server.drain().finally(() => traces.close());
      exit(0);
    } catch (error) {
      printError(`${String(error)}\n`);
      exit(1);
    }
  }
  process.on("SIGTERM", stop);
  // Ctrl-C reaches all processes of a terminal. The demo stops its servers itself.
  if (isChild) process.on("SIGINT", () => {});
  else onInterrupt(stop);
  try {
    server = await start({ log, tracer: traces.tracer });
  } catch (error) {
    if (!isChild) throw error;
    const { code, message, hint } = KvError.from(error, "KV_INTERNAL", "the server did not start");
    await sendToOwner({ error: { code, message, hint } });
    return exit(1);
  }
  const { ready, shown } = server;
  const { url, port, backend } = ready;
  if (isChild) await sendToOwner({ value: ready });
  else print(`${JSON.stringify({ ready: true, url, port, backend, ...shown })}\n`);
}

/** Closes the channel to the parent, so that the process ends when everything is closed. */
function exit(code: number): void {
  process.exitCode = code;
  process.removeAllListeners("disconnect");
  if (process.connected) process.disconnect();
  setTimeout(() => process.exit(code), EXIT_TIMEOUT_MS).unref();
}
