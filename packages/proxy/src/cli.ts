#!/usr/bin/env node
import { readFileSync } from "node:fs";
import { setFlagsFromString } from "node:v8";
import { KvError } from "@kv/interface";
import { parseCli } from "./cli-options.js";
import { instanceName } from "./instance.js";
import { createPinoLog } from "./pino-log.js";
import { createProxy } from "./proxy.js";
import type { Role } from "./upstream.js";

/**
 * A full collection holds all requests up for tens of milliseconds. V8 lets the heap grow to four times what lives before the next one, and to a
 * third more only where the core is slow or shared: then one came every five seconds.
 */
const HEAP_GROWTH_PERCENT = 400;

async function main(): Promise<void> {
  setFlagsFromString(`--heap-growing-percent=${HEAP_GROWTH_PERCENT}`);
  const sources = { readFile: (path: string) => readFileSync(path, "utf8"), env: process.env };
  const { host, port, logLevel, settings } = parseCli(process.argv.slice(2), sources);
  const log = createPinoLog(logLevel, process.stderr);
  if (settings.admin === undefined && process.env.KV_PROXY_ADMIN_TOKEN !== undefined)
    log.warn("setting-unused", { setting: "KV_PROXY_ADMIN_TOKEN", why: "there is no --admin-port" });
  const proxy = createProxy({ ...settings, log });
  const { url, adminUrl } = await proxy.listen({ host, port }).catch(async (error: unknown) => {
    await proxy.close({ graceMs: 0 });
    throw error;
  });
  const names = (role: Role) => proxy.instances[role].list().map(instanceName).join(" ");
  const admin = adminUrl === undefined ? "" : ` admin ${adminUrl}`;
  process.stdout.write(
    `kv-proxy ready ${url} prefill ${names("prefill")} decode ${names("decode")}${admin}\n`,
  );

  let asked = 0;
  const stop = (signal: NodeJS.Signals) => {
    asked++;
    log.info("closing", { signal, in_flight: proxy.status().requests.in_flight });
    // The second signal is impatience: requests in flight are given up.
    proxy.close(asked > 1 ? { graceMs: 0 } : {}).catch(fail);
  };
  process.on("SIGTERM", stop);
  process.on("SIGINT", stop);
}

function fail(thrown: unknown): void {
  const error = KvError.from(thrown, "KV_INTERNAL", "kv-proxy failed");
  process.stderr.write(
    `kv-proxy: ${error.code}: ${error.message}${error.hint ? `\nhint: ${error.hint}` : ""}\n`,
  );
  process.exitCode = 1;
}

main().catch(fail);
