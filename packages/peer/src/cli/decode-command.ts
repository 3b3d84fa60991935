import { nixlTransport } from "@kv/nixl";
import { onInterrupt, print, printJson, showProgress } from "@kv/program";
import type { Command } from "commander";
import type { EngineServer } from "../http/engine-server.js";
import { load } from "../load/load.js";
import { loadReport, loadText } from "../load/load-report.js";
import { addPeerCommand, openSideChannel, type ReachOptions } from "./options.js";

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
  addPeerCommand(program, "decode").action(run);
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
