import { writeFile } from "node:fs/promises";
import { nixlTransport } from "@kv/nixl";
import {
  count,
  duration,
  listOf,
  onInterrupt,
  positiveNumber,
  print,
  printJson,
  share,
  wholeNumber,
} from "@kv/program";
import type { Command } from "commander";
import { serverUrl } from "../doctor/target.js";
import { EngineServer } from "../http/engine-server.js";
import { load } from "../load/load.js";
import { loadPlot } from "../load/load-plot.js";
import { loadReport, loadText } from "../load/load-report.js";
import { addReachOptions, openSideChannel, type ReachOptions, timeOption } from "./options.js";

interface Options extends ReachOptions {
  prefill: string;
  promptTokens: number[];
  concurrency: number;
  rate?: number;
  duration?: number;
  requests?: number;
  abort: number;
  notify?: number;
  noNotify?: number;
  lease: number;
  maxFailed: number;
  maxLeakedBlocks: number;
  maxP99?: number;
  allowUnknownLeaks?: true;
  plot?: string;
  json?: true;
}

export function addDecode(program: Command): void {
  const command = program
    .command("decode")
    .description(
      "a decode worker without a model: send prompts, receive their KV, check, time and drop it; exit code 1 when a limit is exceeded",
    )
    .optionsGroup("Load:")
    .requiredOption("--prefill <url>", "the prefill server's HTTP port", serverUrl)
    .option("--prompt-tokens <n,…>", "lengths of the prompts, used in turn", listOf(count), [100])
    .option("--concurrency <n>", "requests at the same time", count, 4)
    .option("--rate <n>", "requests started per second; no limit when absent", positiveNumber)
    .option("--duration <time>", "end after this time, such as 90s or 2m", duration)
    .option("--requests <n>", "end after this number; 20 when no duration is given either", count)
    .option(
      "--abort <share>",
      "share of requests that are aborted during their read, such as 5%",
      share,
      0,
    )
    .option(
      "--no-notify <share>",
      "share of requests that are read without notifying prefill, such as 1%: their blocks stay for a lease",
      share,
    )
    .addOption(timeOption("--lease <time>", "the server's kv_lease_duration", "30s"))
    .optionsGroup("Limits:")
    .option("--max-failed <n>", "limit of failed requests", wholeNumber, 0)
    .option("--max-leaked-blocks <n>", "limit of leaked blocks", wholeNumber, 0)
    .option("--max-p99 <ms>", "limit of the p99 of reading", count)
    .option("--allow-unknown-leaks", "pass when the server's /metrics do not show its blocks")
    .optionsGroup("Side channel:");
  addReachOptions(command)
    .optionsGroup("Options:")
    .option("--plot <file>", "write latencies over time as SVG")
    .option("--json", "print a JSON report")
    .action(run);
}

async function run(options: Options): Promise<void> {
  const server = new EngineServer(options.prefill);
  await using transport = nixlTransport();
  await using sideChannel = openSideChannel(options);
  // Ctrl-C ends the load, and still prints the report where the server answers.
  const stop = new AbortController();
  onInterrupt(() => stop.abort());
  await server.health();
  const result = await load({
    ...options,
    server,
    transport,
    sideChannel,
    ratePerSecond: options.rate,
    durationMs: options.duration,
    leaseMs: options.lease,
    abortShare: options.abort,
    noNotifyShare: noNotifyShare(options),
    signal: stop.signal,
  });
  const vllmVersion = await server.version().catch(() => undefined);
  const report = loadReport(
    result,
    { url: server.url, vllmVersion },
    { ...options, maxPullP99Ms: options.maxP99 },
  );
  if (options.plot !== undefined)
    await writeFile(options.plot, loadPlot(result, `kv-peer decode, ${server.url}`));
  if (options.json) printJson(report);
  else print(loadText(report));
  if (report.verdict === "fail") process.exitCode = 1;
}

/** Commander reads "--no-x" as the negation of "--x" and stores the value there. */
function noNotifyShare({ notify, noNotify }: Options): number {
  return [notify, noNotify].find((value) => typeof value === "number") ?? 0;
}
