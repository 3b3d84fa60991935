import { randomUUID } from "node:crypto";
import type { Log } from "@kv/interface";
import { chooseTransport, type TransportName } from "../cluster/choose-transport.js";
import { type Cluster, startCluster } from "../cluster/cluster.js";
import type { ClusterOptions } from "../cluster/cluster-plan.js";
import type { LogLevel } from "../processes/json-log.js";
import { type CheckedRun, checkRun } from "./check-run.js";
import { prepareRun } from "./prepare-run.js";
import type { RunFacts } from "./report.js";

export interface DemoOptions extends Omit<ClusterOptions, "transport" | "cacheTokens"> {
  /** NIXL where it is to be had, when absent. */
  readonly transport?: TransportName;
  /** Requests at once; one per prompt of the file when absent and there is a file, else 4. */
  readonly requests?: number;
  readonly promptsFile?: string;
  readonly maxTokens: number;
  readonly restart: boolean;
  readonly port: number;
}

export interface DemoRun {
  readonly run: CheckedRun;
  readonly facts: RunFacts;
  /** Still up: the caller closes it. */
  readonly cluster: Cluster;
  readonly modelName: string;
}

export interface DemoSurroundings {
  /** A line for the person who waits. */
  readonly say: (line: string) => void;
  readonly log: Log;
  readonly logLevel: LogLevel;
}

/** The whole demonstration: reference, servers, requests, comparison. */
export async function runDemo(options: DemoOptions, around: DemoSurroundings): Promise<DemoRun> {
  const { say, log, logLevel } = around;
  const { maxTokens } = options;
  const transport = await chooseTransport(options.transport, say);
  const prepared = await prepareRun(options, say);
  const { prompts, modelName } = prepared;
  const cacheTokens = prompts.reduce(
    (sum, prompt) => sum + prompt.length + maxTokens + options.decodeBlockSize,
    0,
  );
  say(describe(options, transport));
  const cluster = await startCluster(
    { ...options, transport, cacheTokens },
    { log, logLevel, restart: options.restart, proxyPort: options.port },
  );
  try {
    say(`sending ${prompts.length} prompts at once through ${cluster.proxy.url}`);
    const run = await checkRun(cluster, {
      ...prepared,
      runId: randomUUID().slice(0, 8),
      log,
    });
    const facts: RunFacts = {
      transport,
      backend: cluster.prefills[0]?.backend ?? "none",
      connector: options.connector,
      prefillTp: options.prefillTp,
      decodeTp: options.decodeTp,
      prefillPlatform: options.prefillPlatform ?? "cpu",
      decodePlatform: options.decodePlatform ?? "cpu",
    };
    return { run, facts, cluster, modelName };
  } catch (error) {
    await cluster.close();
    throw error;
  }
}

function describe(options: DemoOptions, transport: TransportName): string {
  const side = (count: number, role: string, tp: number, blockSize: number, platform = "cpu") =>
    `${count} ${role} (TP ${tp}, block ${blockSize}${platform === "cpu" ? "" : `, ${platform}, simulated`})`;
  const where =
    transport === "nixl"
      ? "each in its own process, over NIXL"
      : "in this process, on the embedded transport";
  return `starting ${side(options.prefills, "prefill", options.prefillTp, options.prefillBlockSize, options.prefillPlatform)}, ${side(options.decodes, "decode", options.decodeTp, options.decodeBlockSize, options.decodePlatform)} and a proxy, ${where}`;
}
