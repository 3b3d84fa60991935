#!/usr/bin/env node
import { readFileSync } from "node:fs";
import tab from "@bomb.sh/tab/commander";
import { instanceName, type Role } from "@kv/fleet";
import {
  connectKubernetes,
  createCommand,
  jsonLog,
  openTracer,
  reloadAtHangup,
} from "@kv/fleet/front-end";
import { print, printError, reportFailure, runProgram } from "@kv/program";
import { PROGRAM, parseCli } from "./config/cli-options.js";
import { readSettings } from "./config/settings.js";
import { createPicker } from "./picker.js";

async function main(): Promise<void> {
  if (process.argv[2] === "complete") {
    const command = createCommand(PROGRAM);
    tab(command);
    command.parse();
    return;
  }
  const parse = () => parseCli(process.argv.slice(2), (path) => readFileSync(path, "utf8"));
  const options = parse();
  const { host, port, logLevel, trace, settings } = options;
  const log = jsonLog(logLevel, { write: printError });
  const instance = `${process.pid}`;
  const spans = await openTracer(trace, { service: "kv-epp", instance, log });
  const { tracer } = spans;
  const createDiscovery = await connectKubernetes(readSettings(settings).discovery);
  const picker = createPicker({ ...settings, log, tracer, createDiscovery });
  const address = await picker.listen({ host, port }).catch(async (error: unknown) => {
    await picker.close({ drainMs: 0, graceMs: 0 });
    throw error;
  });
  const names = (role: Role) => picker.instances[role].list().map(instanceName).join(" ");
  const { healthPort, metricsUrl } = address;
  const more = [
    ...(healthPort === undefined ? [] : [` health ${host}:${healthPort}`]),
    ...(metricsUrl === undefined ? [] : [` metrics ${metricsUrl}`]),
  ].join("");
  const stop = (signal: NodeJS.Signals) => {
    log.info("closing", { signal, in_flight: picker.status().in_flight });
    // A second signal ends the waits.
    picker
      .close()
      .then(() => spans.close())
      .catch(fail);
  };
  reloadAtHangup({ log, options, parse, reload: (next) => picker.reload(next.settings) });
  process.on("SIGTERM", stop);
  process.on("SIGINT", stop);
  // A reader of this line may send a signal at once.
  print(
    `kv-epp ready ${host}:${address.port} prefill ${names("prefill")} decode ${names("decode")}${more}\n`,
  );
}

function fail(thrown: unknown): void {
  process.exitCode = reportFailure("kv-epp", thrown);
}

await runProgram("kv-epp", main);
