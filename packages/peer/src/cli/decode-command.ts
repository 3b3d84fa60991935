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
  showProgress,
  wholeNumber,
} from "@kv/program";
import type { Command } from "commander";
import type { EngineServer } from "../http/engine-server.js";
import { load } from "../load/load.js";
import { loadReport, loadText } from "../load/load-report.js";
import {
  addReachOptions,
  engineServer,
  openSideChannel,
  type ReachOptions,
  timeOption,
} from "./options.js";

interface Options extends ReachOptions {
  prefill: EngineServer;
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
  json?: true;
}

export function addDecode(program: Command): void {
  const command = program
    .command("decode")
    .description(
      "a decode worker without a model: send prompts, receive their KV, check, time and drop it; exit code 1 when a limit is exceeded",
    )
    .optionsGroup("Load:")
    .requiredOption("--prefill <url>", "the prefill server's HTTP port", engineServer)
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
    .option("--json", "print a JSON report")
    .action(run);
}

async function run(options: Options): Promise<void> {
  const server = options.prefill;
  await using transport = nixlTransport();
  await using sideChannel = openSideChannel(options);
  const stop = new AbortController();
  onInterrupt(() => stop.abort());
  await server.health();
  let ended = 0;
  using _ = showProgress("kv-peer", () => `${ended} requests ended`);
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
    progress: (done) => {
      ended = done;
    },
  });
  const vllmVersion = await server.version().catch(() => undefined);
  const report = loadReport(
    result,
    { url: server.url, vllmVersion },
    { ...options, maxPullP99Ms: options.maxP99 },
  );
  if (options.json) printJson(report);
  else print(loadText(report));
  if (report.verdict === "fail") process.exitCode = 1;
}

/** Commander stores "--no-x", as the negation of "--x", there. */
function noNotifyShare({ notify, noNotify }: Options): number {
  return [notify, noNotify].find((value) => typeof value === "number") ?? 0;
}
