import { zmqSideChannel } from "@kv/connector";
import { KvError } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { createProxy, type ProxySettingsInput } from "@kv/proxy";
import { demoConnectors } from "../instance/connectors.js";
import { startInstance } from "../instance/instance.js";
import { readInstanceConfig } from "../instance/instance-config.js";
import type { FromChild } from "./child-process.js";
import { jsonLog, type LogLevel } from "./json-log.js";

/** A server of this program, whichever. */
export interface RoleServer {
  readonly url: string;
  readonly port: number;
  readonly backend: string | null;
  /** Ends it in peace. */
  drain(): Promise<void>;
}

/**
 * Runs a server until SIGTERM or SIGINT, which drain it; a second signal ends it at once. As a child of the demo it reports over IPC and ends
 * when the parent is gone, however the parent ended: the channel closes even when it is killed. Alone it prints a line
 * of JSON.
 */
export async function runRole(start: () => Promise<RoleServer>): Promise<void> {
  const isChild = process.send !== undefined;
  // Before anything is opened: a parent may die while its child starts.
  if (isChild) process.once("disconnect", () => process.exit(1));
  let stopping: Promise<void> | undefined;
  let server: RoleServer | undefined;
  const stop = () => {
    if (stopping !== undefined || server === undefined) process.exit(1);
    stopping = server.drain().then(
      () => leave(0),
      (error: unknown) => {
        process.stderr.write(`${String(error)}\n`);
        leave(1);
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
    await tell({ kind: "failed", error: { code, message, hint } });
    leave(1);
    return;
  }
  const { url, port, backend } = server;
  if (isChild) await tell({ kind: "ready", url, port, backend });
  else process.stdout.write(`${JSON.stringify({ ready: true, url, port, backend })}\n`);
}

function tell(message: FromChild): Promise<void> {
  return new Promise((resolve) => {
    if (process.send === undefined || !process.connected) resolve();
    else process.send(message, undefined, undefined, () => resolve());
  });
}

/** Lets go of what keeps a child alive, so that it ends by itself when all it had has been closed. */
function leave(code: number): void {
  process.exitCode = code;
  process.removeAllListeners("disconnect");
  if (process.connected) process.disconnect();
  // Something that was not closed must not keep it for ever.
  setTimeout(() => process.exit(code), LAST_MOMENTS_MS).unref();
}

const LAST_MOMENTS_MS = 2000;

/** One prefill or decode server over NIXL, in this process. `config` is JSON text (`InstanceConfigInput`). */
export async function runInstance({
  config,
  logLevel,
}: {
  config: string;
  logLevel: LogLevel;
}): Promise<void> {
  const settings = readInstanceConfig(parse(config));
  const log = jsonLog(logLevel, { instance: settings.name ?? settings.role, pid: process.pid });
  const registry = demoConnectors();
  await runRole(() =>
    startInstance(settings, {
      log,
      transport: nixlTransport({ log }),
      sideChannel: zmqSideChannel({ log }),
      resolveConnector: (transfer) => registry.resolve(transfer),
    }),
  );
}

function parse(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch (cause) {
    throw new KvError("KV_CONFIG_INVALID", `--config is not JSON: ${(cause as Error).message}`, { cause });
  }
}

/** The proxy in a process of its own. `config` is JSON text (`ProxySettingsInput` and a port). */
export async function runProxy({ config, logLevel }: { config: string; logLevel: LogLevel }): Promise<void> {
  const { port = 0, ...settings } = JSON.parse(config) as ProxySettingsInput & { port?: number };
  const log = jsonLog(logLevel, { instance: "proxy", pid: process.pid });
  await runRole(async () => {
    const proxy = createProxy({ ...settings, log });
    const address = await proxy.listen({ port });
    return { ...address, backend: null, drain: () => proxy.close() };
  });
}
