import { jsonLog } from "@kv/fleet/front-end";
import { endWithOwner, print, printError, runProgram } from "@kv/program";
import { accuracyTable, measureAccuracy } from "./accuracy/accuracy.js";
import { type AccuracyFlags, createCommand, type DemoFlags } from "./command-line.js";
import { runInstance, runProxy } from "./processes/roles.js";
import { runDemo, runTurns } from "./run/demo.js";
import { jsonReport, tableReport } from "./run/report.js";
import { areEqual, turnsTable } from "./run/turns.js";

/** Progress goes to stderr, because stdout is for the result. */
const say = (line: string) => printError(`${line}\n`);

/**
 * `npm run demo` starts this process with an IPC channel, which closes when it ends. The open
 * channel does not keep this process alive.
 */
function followOwner(): void {
  endWithOwner();
  process.channel?.unref();
}

async function demo({ turns, json, ...options }: DemoFlags): Promise<void> {
  followOwner();
  const output = { say, log: jsonLog(options.logLevel, { write: printError }) };
  if (turns !== undefined) {
    const played = await runTurns(turns, options, output);
    const ok = areEqual(played);
    print(json ? `${JSON.stringify({ ok, turns: played })}\n` : `\n${turnsTable(played)}`);
    process.exitCode = ok ? 0 : 1;
    return;
  }
  const stopSignal = waitForStopSignal();
  const work = runDemo(options, output);
  // Stopped during the run: the servers end with this process.
  if (typeof (await Promise.race([work, stopSignal])) === "string") process.exit(130);
  const { run, facts, cluster, modelName } = await work;
  const { keep, adminPort } = options;
  try {
    if (json) print(`${JSON.stringify(jsonReport(run, facts))}\n`);
    else print(`\n${tableReport(run, facts)}`);
    process.exitCode = run.ok ? 0 : 1;
    if (keep) {
      say(`the proxy keeps running at ${cluster.proxy.url}; stop it with Ctrl-C. Example:`);
      say(curlLine(cluster.proxy.url, modelName));
      if (adminPort !== undefined) say(`the proxy's page is http://127.0.0.1:${adminPort}/`);
      await stopSignal;
    }
  } finally {
    // A child ends when this process does.
    if (keep) setTimeout(() => process.exit(130), 900).unref();
    await cluster.close();
  }
}

async function accuracy({ json, ...options }: AccuracyFlags): Promise<void> {
  followOwner();
  const report = await measureAccuracy({
    ...options,
    say,
    log: jsonLog(options.logLevel, { write: printError }),
  });
  print(json ? `${JSON.stringify(report)}\n` : `\n${accuracyTable(report)}`);
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
