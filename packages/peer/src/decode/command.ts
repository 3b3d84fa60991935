import { writeFile } from "node:fs/promises";
import { zmqSideChannel } from "@kv/connector";
import { KvError } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { type Command, Option } from "commander";
import { readTarget } from "../doctor/target.js";
import { atLeastZero, count, counts, duration, port, share } from "../option-values.js";
import { engineServer } from "../server/server.js";
import { load } from "./load.js";
import { loadPlot } from "./load-plot.js";
import { loadReport } from "./load-report.js";
import { loadText } from "./load-text.js";

interface Options {
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
  sideChannelHost: string;
  sideChannelPort: number;
  plot?: string;
  json?: true;
}

export function addDecode(program: Command): void {
  program
    .command("decode")
    .description(
      "a decode worker without a model: send prompts, read their KV or have it written, check, time and drop it; exit code 1 when a limit is not kept",
    )
    .requiredOption("--prefill <url>", "the prefill server's HTTP port")
    .option("--prompt-tokens <n,…>", "lengths of prompts, in turn", counts, [100])
    .option("--concurrency <n>", "requests at a time at most", count, 4)
    .option("--rate <n>", "requests begun per second; as many as go when absent", Number)
    .option("--duration <time>", "such as 90s or 2m", duration)
    .option("--requests <n>", "how many; 20 when no duration is given either", count)
    .option("--abort <share>", "requests given up while they are read, such as 5%", share, 0)
    .option(
      "--no-notify <share>",
      "requests read without saying so, such as 1%: their blocks stay for a lease",
      share,
    )
    .addOption(
      new Option("--lease <time>", "the server's kv_lease_duration")
        .argParser(duration)
        .default(30_000, "30s"),
    )
    .option("--max-failed <n>", "limit", atLeastZero, 0)
    .option("--max-leaked-blocks <n>", "limit", atLeastZero, 0)
    .option("--max-p99 <ms>", "limit of reading, p99", count)
    .option("--allow-unknown-leaks", "pass where the server's /metrics tell nothing of its blocks")
    .option("--side-channel-host <host>", "where a server that pushes finds this one", "127.0.0.1")
    .option("--side-channel-port <port>", "0 takes a free one", port, 0)
    .option("--plot <file>", "write latencies over time as SVG")
    .option("--json", "print a JSON report")
    .action(run);
}

async function run(options: Options): Promise<void> {
  const target = readTarget(options.prefill);
  if (target.kind !== "server") {
    throw new KvError(
      "KV_CONFIG_INVALID",
      `--prefill is ${options.prefill}, and prompts go to an HTTP port`,
      {
        hint: `give http://${options.prefill} if that is one`,
      },
    );
  }
  const { rate, maxP99 } = options;
  if (rate !== undefined && !(rate > 0))
    throw new KvError("KV_CONFIG_INVALID", `--rate is ${rate}, not above 0`);
  const server = engineServer(target.url);
  const transport = nixlTransport();
  const sideChannel = zmqSideChannel();
  // The first signal ends the load and still reports; the second one ends the process.
  const stop = new AbortController();
  process.once("SIGINT", () => stop.abort());
  try {
    await server.health();
    const result = await load({
      server,
      transport,
      sideChannel,
      promptTokens: options.promptTokens,
      concurrency: options.concurrency,
      leaseMs: options.lease,
      abortShare: options.abort,
      noNotifyShare: silentShare(options),
      signal: stop.signal,
      sideChannelHost: options.sideChannelHost,
      sideChannelPort: options.sideChannelPort,
      ...(rate === undefined ? {} : { ratePerSecond: rate }),
      ...(options.duration === undefined ? {} : { durationMs: options.duration }),
      ...(options.requests === undefined ? {} : { requests: options.requests }),
    });
    const vllmVersion = await server.version().catch(() => undefined);
    const report = loadReport(
      result,
      { url: server.url, vllmVersion },
      {
        maxFailed: options.maxFailed,
        maxLeakedBlocks: options.maxLeakedBlocks,
        allowUnknownLeaks: options.allowUnknownLeaks === true,
        ...(maxP99 === undefined ? {} : { maxPullP99Ms: maxP99 }),
      },
    );
    if (options.plot !== undefined)
      await writeFile(options.plot, loadPlot(result, `kv-peer decode, ${server.url}`));
    process.stdout.write(options.json ? `${JSON.stringify(report, null, 2)}\n` : loadText(report));
    if (report.verdict === "fail") process.exitCode = 1;
  } finally {
    await sideChannel.close();
    await transport.close();
  }
}

/** Commander takes "--no-x" for the negation of "--x", and puts its value there. */
function silentShare({ notify, noNotify }: Options): number {
  return [notify, noNotify].find((value) => typeof value === "number") ?? 0;
}
