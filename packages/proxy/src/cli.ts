#!/usr/bin/env node
import { readFileSync } from "node:fs";
import { setFlagsFromString } from "node:v8";
import tab from "@bomb.sh/tab/commander";
import { instanceName, type Role } from "@kv/fleet";
import { connectKubernetes, jsonLog, PREFILLER_HEADER } from "@kv/fleet/front-end";
import { onInterrupt, openSpanOutput, reportFailure, runProgram } from "@kv/interface/program";
import { OtlpTracer } from "@kv/protocol";
import { createCommand } from "./config/cli-command.js";
import { parseCli } from "./config/cli-options.js";
import { readSettings } from "./config/settings.js";
import { createProxy } from "./proxy.js";
import { sidecarOfRank } from "./sidecar/data-parallel.js";

/**
 * How much the heap may grow above its live size before the next full garbage collection, which delays all requests by tens of milliseconds. On a
 * slow or shared core, V8's default is a third, which made one collection every five seconds.
 */
const HEAP_GROWTH_PERCENT = 400;

async function main(): Promise<void> {
  if (process.argv[2] === "complete") {
    const command = createCommand();
    tab(command);
    command.parse();
    return;
  }
  setFlagsFromString(`--heap-growing-percent=${HEAP_GROWTH_PERCENT}`);
  const sources = { readFile: (path: string) => readFileSync(path, "utf8"), env: process.env };
  const { host, port, logLevel, trace, settings, dataParallelSize } = parseCli(
    process.argv.slice(2),
    sources,
  );
  const log = jsonLog(logLevel, process.stderr);
  if (settings.admin === undefined && process.env.KV_PROXY_ADMIN_TOKEN !== undefined)
    log.warn("setting-unused", { setting: "KV_PROXY_ADMIN_TOKEN", why: "--admin-port is not given" });
  const spans = openSpanOutput({ file: trace, env: process.env, log });
  const tracer =
    spans && new OtlpTracer({ service: "kv-proxy", instance: `${process.pid}`, write: spans.write });
  const createDiscovery = await connectKubernetes(readSettings(settings).discovery);
  // One for each rank; else the only one.
  const sidecars = Array.from({ length: dataParallelSize }, (_, rank) =>
    sidecarOfRank({ port, settings }, rank),
  );
  const proxies = sidecars.map((sidecar) =>
    createProxy({ ...sidecar.settings, log, tracer, createDiscovery }),
  );
  const close = (options?: { graceMs: number }) => Promise.all(proxies.map((proxy) => proxy.close(options)));
  const addresses = await Promise.all(
    proxies.map((proxy, rank) => proxy.listen({ host, port: sidecars[rank]?.port })),
  ).catch(async (error: unknown) => {
    await close({ graceMs: 0 });
    throw error;
  });

  let signals = 0;
  const stop = (signal: NodeJS.Signals) => {
    signals += 1;
    const inFlight = proxies.reduce((sum, proxy) => sum + proxy.status().requests.in_flight, 0);
    log.info("closing", { signal, in_flight: inFlight });
    // Ctrl-C, and a second SIGTERM, abort the requests in flight.
    close(signals > 1 || signal === "SIGINT" ? { graceMs: 0 } : undefined)
      .then(() => tracer?.close())
      .then(() => spans?.close())
      .catch(fail);
  };
  process.on("SIGTERM", stop);
  onInterrupt(() => stop("SIGINT"));

  // Whoever reads a line may send a signal at once.
  for (const [rank, proxy] of proxies.entries()) {
    const { url, adminUrl } = addresses[rank] ?? {};
    const names = (role: Role) => proxy.instances[role].list().map(instanceName).join(" ");
    const admin = adminUrl === undefined ? "" : ` admin ${adminUrl}`;
    const prefill = settings.sidecar === undefined ? names("prefill") : PREFILLER_HEADER;
    process.stdout.write(`kv-proxy ready ${url} prefill ${prefill} decode ${names("decode")}${admin}\n`);
  }
}

function fail(thrown: unknown): void {
  process.exitCode = reportFailure("kv-proxy", thrown, (text) => process.stderr.write(text));
}

await runProgram("kv-proxy", main);
