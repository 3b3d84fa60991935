import { zmqSideChannel } from "@kv/connector";
import { KvError } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { createProxy, type ProxySettingsInput } from "@kv/proxy";
import { startInstance } from "../instance/instance.js";
import { readInstanceConfig } from "../instance/instance-config.js";
import type { ChildMessage } from "./child-process.js";
import { jsonLog, type LogLevel } from "./json-log.js";

/** Options of a role's command. */
export interface RoleOptions {
  /** Settings as JSON text. */
  readonly config: string;
  readonly logLevel: LogLevel;
}

/** Runs one prefill or decode server over NIXL in this process. `config` is an `InstanceConfigInput`. */
export async function runInstance({ config, logLevel }: RoleOptions): Promise<void> {
  const settings = readInstanceConfig(parseConfig(config));
  const log = jsonLog(logLevel, { instance: settings.name ?? settings.role, pid: process.pid });
  await runServer(() =>
    startInstance(settings, {
      log,
      transport: nixlTransport({ log }),
      sideChannel: zmqSideChannel({ log }),
    }),
  );
}

/** Runs the proxy in this process. `config` is a `ProxySettingsInput` with a port. */
export async function runProxy({ config, logLevel }: RoleOptions): Promise<void> {
  const { port = 0, ...settings } = parseConfig(config) as ProxySettingsInput & { port?: number };
  const log = jsonLog(logLevel, { instance: "proxy", pid: process.pid });
  await runServer(async () => {
    const proxy = createProxy({ ...settings, log });
    const address = await proxy.listen({ port });
    return { ...address, backend: null, drain: () => proxy.close() };
  });
}

function parseConfig(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch (cause) {
    throw new KvError("KV_CONFIG_INVALID", `--config is not JSON: ${(cause as Error).message}`, { cause });
  }
}

interface Server {
  readonly url: string;
  readonly port: number;
  readonly backend: string | null;
  /** Finishes running requests and closes the server. */
  drain(): Promise<void>;
}

/** Time for the process to end by itself after its server was closed. */
const EXIT_TIMEOUT_MS = 2000;

/**
 * Runs a server until SIGTERM or SIGINT, which drain it; a second signal ends the process at once. A child of the demo reports over IPC and
 * ends when its parent is gone: the channel closes even when the parent is killed. A process of its own prints one line of JSON.
 */
async function runServer(start: () => Promise<Server>): Promise<void> {
  const isChild = process.send !== undefined;
  // Before anything is opened: the parent may end while its child starts.
  if (isChild) process.once("disconnect", () => process.exit(1));
  let stopping: Promise<void> | undefined;
  let server: Server | undefined;
  const stop = () => {
    if (stopping !== undefined || server === undefined) process.exit(1);
    stopping = server.drain().then(
      () => exit(0),
      (error: unknown) => {
        process.stderr.write(`${String(error)}\n`);
        exit(1);
      },
    );
  };
  process.on("SIGTERM", stop);
  process.on("SIGINT", stop);
  try {
    server = await start();
  } catch (error) {
    const { code, message, hint } = KvError.from(error, "KV_INTERNAL", "the server did not start");
    if (!isChild) throw error;
    await sendToParent({ kind: "failed", error: { code, message, hint } });
    exit(1);
    return;
  }
  const { url, port, backend } = server;
  if (isChild) await sendToParent({ kind: "ready", url, port, backend });
  else process.stdout.write(`${JSON.stringify({ ready: true, url, port, backend })}\n`);
}

function sendToParent(message: ChildMessage): Promise<void> {
  return new Promise((resolve) => {
    if (process.send === undefined || !process.connected) resolve();
    else process.send(message, undefined, undefined, () => resolve());
  });
}

/** Closes the channel to the parent, which keeps the process alive, so that the process ends when everything is closed. */
function exit(code: number): void {
  process.exitCode = code;
  process.removeAllListeners("disconnect");
  if (process.connected) process.disconnect();
  setTimeout(() => process.exit(code), EXIT_TIMEOUT_MS).unref();
}
