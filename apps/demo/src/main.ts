import { KvError } from "@kv/interface";
import { createCommand, type DemoFlags } from "./command-line.js";
import { jsonLog } from "./processes/json-log.js";
import { runInstance, runProxy } from "./processes/roles.js";
import { runDemo } from "./run/demo.js";
import { jsonReport, tableReport } from "./run/report.js";

/** Progress goes to stderr, so that stdout holds the result alone. */
const say = (line: string) => void process.stderr.write(`${line}\n`);

async function demo(flags: DemoFlags): Promise<void> {
  // A parent that gave us a channel wants us gone when it is; our own children have one to us.
  process.once("disconnect", () => process.exit(1));
  // The listener alone would keep this process for as long as the parent lives, which waits for its end.
  process.channel?.unref();
  const asked = untilAskedToEnd();
  const log = jsonLog(flags.logLevel);
  const work = runDemo(flags, { say, log, logLevel: flags.logLevel });
  // Asked to end in the middle: the servers end with this process.
  if (typeof (await Promise.race([work, asked])) === "string") process.exit(130);
  const { run, facts, cluster, modelName } = await work;
  try {
    if (flags.json) process.stdout.write(`${JSON.stringify(jsonReport(run, facts))}\n`);
    else process.stdout.write(`\n${tableReport(run, facts)}`);
    process.exitCode = run.ok ? 0 : 1;
    if (flags.keep) {
      say(`the proxy stays up at ${cluster.proxy.url}; end it with Ctrl-C. For example:`);
      say(curlLine(cluster.proxy.url, modelName));
      await asked;
    }
  } finally {
    await cluster.close();
  }
}

function fail(thrown: unknown): void {
  const error = KvError.from(thrown, "KV_INTERNAL", "the demo failed");
  say(`error: ${error.code}: ${error.message}${error.hint === undefined ? "" : `\nhint: ${error.hint}`}`);
  process.exitCode = 1;
}

createCommand({ demo, instance: runInstance, proxy: runProxy }).parseAsync().catch(fail);

/** Resolves at SIGINT or SIGTERM. */
export function untilAskedToEnd(): Promise<NodeJS.Signals> {
  return new Promise((resolve) => {
    for (const signal of ["SIGINT", "SIGTERM"] as const) process.once(signal, () => resolve(signal));
  });
}

/** A line to paste. */
export function curlLine(url: string, model: string): string {
  const body = JSON.stringify({
    model,
    prompt: [21, 31, 55, 93],
    max_tokens: 16,
    temperature: 0,
    ignore_eos: true,
  });
  return `curl ${url}/v1/completions -H 'content-type: application/json' -d '${body}'`;
}
