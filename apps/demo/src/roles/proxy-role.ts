import { createProxy, type ProxySettingsInput } from "@kv/proxy";
import { jsonLog, type LogLevel } from "./json-log.js";
import { runRole } from "./run-role.js";

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
