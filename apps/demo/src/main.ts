import { endWithOwner, print, printError, runProgram } from "@kv/program";
import { accuracyJson, accuracyTable, measureAccuracy } from "./accuracy/accuracy.js";
import { type AccuracyFlags, createCommand, type DemoFlags } from "./command-line.js";
import { jsonLog } from "./processes/json-log.js";
import { runInstance, runProxy } from "./processes/roles.js";
import { runDemo, runTurns } from "./run/demo.js";
import { jsonReport, tableReport } from "./run/report.js";
import { areEqual, turnsJson, turnsTable } from "./run/turns.js";

/** Progress goes to stderr, because stdout is for the result. */
const say = (line: string) => printError(`${line}\n`);

async function demo(flags: DemoFlags): Promise<void> {
  // `npm run demo` starts this process with an IPC channel. When it ends, the channel closes and
  // this process ends too.
  endWithOwner();
  // The open channel must not keep this process alive.
  process.channel?.unref();
  const log = jsonLog(flags.logLevel);
  const output = { say, log, logLevel: flags.logLevel };
  const { turns } = flags;
  if (turns !== undefined) {
    const played = await runTurns({ ...flags, turns }, output);
    print(flags.json ? `${JSON.stringify(turnsJson(played))}\n` : `\n${turnsTable(played)}`);
    process.exitCode = areEqual(played) ? 0 : 1;
    return;
  }
  const stopSignal = waitForStopSignal();
  const work = runDemo(flags, output);
  // Stopped during the run: the servers end with this process.
  if (typeof (await Promise.race([work, stopSignal])) === "string") process.exit(130);
  const { run, facts, cluster, modelName } = await work;
  try {
    if (flags.json) print(`${JSON.stringify(jsonReport(run, facts))}\n`);
    else print(`\n${tableReport(run, facts)}`);
    process.exitCode = run.ok ? 0 : 1;
    if (flags.keep) {
      say(`the proxy keeps running at ${cluster.proxy.url}; stop it with Ctrl-C. Example:`);
      say(curlLine(cluster.proxy.url, modelName));
      if (flags.adminPort !== undefined)
        say(`the proxy's page is http://127.0.0.1:${flags.adminPort}/`);
      await stopSignal;
    }
  } finally {
    // A child ends when this process does.
    if (flags.keep) setTimeout(() => process.exit(130), 900).unref();
    await cluster.close();
  }
}

async function accuracy({ json, ...options }: AccuracyFlags): Promise<void> {
  endWithOwner();
  process.channel?.unref();
  const report = await measureAccuracy({ ...options, say, log: jsonLog(options.logLevel) });
  print(json ? `${JSON.stringify(accuracyJson(report))}\n` : `\n${accuracyTable(report)}`);
  process.exitCode = report.ok ? 0 : 1;
}

await runProgram("kv-demo", () =>
  createCommand({
    demo,
    accuracy,
    instance: runInstance,
    proxy: runProxy,
  }).parseAsync(),
);

function waitForStopSignal(): Promise<NodeJS.Signals> {
  return new Promise((resolve) => {
    for (const signal of ["SIGINT", "SIGTERM"] as const)
      process.once(signal, () => resolve(signal));
  });
}

function curlLine(url: string, model: string): string {
  const body = JSON.stringify({
    model,
    prompt: [21, 31, 55, 93],
    max_tokens: 16,
    temperature: 0,
    ignore_eos: true,
  });
  return `curl ${url}/v1/completions -H 'content-type: application/json' -d '${body}'`;
}
