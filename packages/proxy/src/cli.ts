#!/usr/bin/env node
import cluster from "node:cluster";
import { readFileSync } from "node:fs";
import { setFlagsFromString } from "node:v8";
import tab from "@bomb.sh/tab/commander";
import {
  connectKubernetes,
  createCommand,
  jsonLog,
  openTracer,
  PREFILLER_HEADER,
  type Reloaded,
  reloadAtHangup,
} from "@kv/fleet/front-end";
import { type Log, systemClock } from "@kv/interface";
import { onInterrupt, print, printError, reportFailure, runProgram } from "@kv/program";
import { type CliOptions, PROGRAM, parseCli } from "./config/cli-options.js";
import { ADMIN_TOKEN, type ProxySettingsInput, readSettings } from "./config/settings.js";
import { createProxy, PrefillDecodeProxy, type SharedByWorkers } from "./proxy.js";
import { sidecarOfRank } from "./sidecar/data-parallel.js";
import { workerSettings } from "./workers/limits-share.js";
import { WorkerGroup, type WorkerGroupAddress } from "./workers/primary.js";
import { warmUp } from "./workers/warm-up.js";
import { instanceNames, serveAsWorker } from "./workers/worker.js";

/**
 * Heap growth, in percent of its live size, before the next full collection. One delays all
 * requests by tens of milliseconds; V8's default (a third) made one every five seconds on a slow
 * core.
 */
const HEAP_GROWTH_PERCENT = 400;

async function main(): Promise<void> {
  if (process.argv[2] === "complete") {
    const command = createCommand(PROGRAM);
    tab(command);
    command.parse();
    return;
  }
  setFlagsFromString(`--heap-growing-percent=${HEAP_GROWTH_PERCENT}`);
  const sources = { readFile: (path: string) => readFileSync(path, "utf8"), env: process.env };
  if (cluster.isWorker) return serveAsWorker(createInWorker, systemClock());
  const parse = () => parseCli(process.argv.slice(2), sources);
  const options = parse();
  const { host, port, logLevel, settings, workers, dataParallelSize } = options;
  const log = jsonLog(logLevel, { write: printError });
  if (settings.admin === undefined && process.env[ADMIN_TOKEN] !== undefined)
    log.warn("setting-unused", { setting: ADMIN_TOKEN, why: "--admin-port is not given" });
  if (workers > 1) {
    const group = new WorkerGroup(options, { log, clock: systemClock() });
    const names = await group.start();
    closeAtSignals(log, (close) => group.close(close));
    reloadAtHangup({ log, options, parse, reload: (next) => group.reload(next) });
    return printReady(settings, names);
  }

  const { given, closeSpans } = await connected(options, log);
  const ranksOf = ({ settings: ofAll }: CliOptions) =>
    Array.from({ length: dataParallelSize }, (_, rank) =>
      sidecarOfRank({ port, settings: ofAll }, rank, dataParallelSize),
    );
  const sidecars = ranksOf(options);
  const proxies = sidecars.map((sidecar) => createProxy({ ...sidecar.settings, ...given }));
  const close = (options?: { readonly graceMs?: number }) =>
    Promise.all(proxies.map((proxy) => proxy.close(options)));
  const reload = (next: CliOptions): Reloaded => {
    const [first] = ranksOf(next).map((sidecar, rank) => proxies[rank]?.reload(sidecar.settings));
    return first ?? { changed: [], needRestart: [] };
  };
  reloadAtHangup({ log, options, parse, reload });
  await warmUp(options, log);
  const addresses = await Promise.all(
    proxies.map((proxy, rank) => proxy.listen({ host, port: sidecars[rank]?.port })),
  ).catch(async (error: unknown) => {
    await close({ graceMs: 0 });
    throw error;
  });
  const inFlight = () => proxies.reduce((sum, proxy) => sum + proxy.status().requests.in_flight, 0);
  closeAtSignals(log, (options) => close(options).then(closeSpans), inFlight);
  for (const [rank, proxy] of proxies.entries()) {
    const { url = "", adminUrl } = addresses[rank] ?? {};
    printReady(settings, { url, adminUrl, ...instanceNames(proxy) });
  }
}

/** What a proxy of these options is created with beside its settings. */
async function connected({ trace, settings }: CliOptions, log: Log) {
  const { tracer, close: closeSpans } = await openTracer(trace, {
    service: "kv-proxy",
    instance: `${process.pid}`,
    log,
  });
  const createDiscovery = await connectKubernetes(readSettings(settings).discovery);
  return { given: { log, tracer, createDiscovery }, closeSpans };
}

async function createInWorker(options: CliOptions, shared: SharedByWorkers) {
  const log = jsonLog(options.logLevel, { write: printError });
  const { given, closeSpans } = await connected(options, log);
  const own = { ...workerSettings(options.settings, options.workers), ...given };
  return { proxy: new PrefillDecodeProxy(own, shared), log, closed: closeSpans };
}

/**
 * Closes at SIGTERM and Ctrl-C. Ctrl-C and any second signal abort the requests in flight.
 */
function closeAtSignals(
  log: Log,
  close: (options: { readonly graceMs?: number }) => Promise<void>,
  inFlight?: () => number,
): void {
  let signals = 0;
  const stop = (signal: NodeJS.Signals) => {
    signals += 1;
    log.info("closing", { signal, in_flight: inFlight?.() });
    close(signals > 1 || signal === "SIGINT" ? { graceMs: 0 } : {}).catch(fail);
  };
  process.on("SIGTERM", stop);
  onInterrupt(() => stop("SIGINT"));
}

/** Needs the signal handlers: a reader of this line may send a signal at once. */
function printReady(
  settings: ProxySettingsInput,
  { url, adminUrl, prefill, decode }: WorkerGroupAddress,
): void {
  const admin = adminUrl === undefined ? "" : ` admin ${adminUrl}`;
  const prefillers = settings.sidecar === undefined ? prefill : PREFILLER_HEADER;
  print(`kv-proxy ready ${url} prefill ${prefillers} decode ${decode}${admin}\n`);
}

function fail(thrown: unknown): void {
  process.exitCode = reportFailure("kv-proxy", thrown);
}

await runProgram("kv-proxy", main);
