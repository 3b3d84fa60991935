import { randomUUID } from "node:crypto";
import { writeFile } from "node:fs/promises";
import { KvError, type Log } from "@kv/interface";
import { chooseTransport, type TransportName } from "../cluster/choose-transport.js";
import { type Cluster, startCluster } from "../cluster/cluster.js";
import type { ClusterOptions } from "../cluster/cluster-plan.js";
import type { LogLevel } from "../processes/json-log.js";
import { type CheckedRun, checkRun } from "./check-run.js";
import { prepareRun } from "./prepare-run.js";
import type { RunFacts } from "./report.js";
import { playConversation, prepareConversation, READBACK, type Turn } from "./turns.js";

export interface DemoOptions extends Omit<ClusterOptions, "transport" | "cacheTokens"> {
  readonly transport?: TransportName | undefined;
  readonly requests?: number | undefined;
  readonly turns?: number | undefined;
  readonly promptsFile?: string | undefined;
  readonly maxTokens: number;
  readonly restart: boolean;
  readonly port: number;
  /** File for the spans of all servers; what it holds is overwritten. */
  readonly trace?: string | undefined;
}

export interface DemoRun {
  readonly run: CheckedRun;
  readonly facts: RunFacts;
  /** Still running: the caller closes it. */
  readonly cluster: Cluster;
  readonly modelName: string;
}

export interface DemoOutput {
  readonly say: (line: string) => void;
  readonly log: Log;
  readonly logLevel: LogLevel;
}

/**
 * Runs the demo: reference tokens, servers, requests, comparison.
 * @throws The errors of the parts; the cluster is closed then.
 */
export async function runDemo(options: DemoOptions, output: DemoOutput): Promise<DemoRun> {
  const { say, log, logLevel } = output;
  const { maxTokens } = options;
  const transport = await prepareServers(options, say);
  const prepared = await prepareRun(options, say);
  const { prompts, modelName } = prepared;
  const cacheTokens = prompts.reduce(
    (sum, prompt) => sum + prompt.length + maxTokens + options.decodeBlockSize,
    0,
  );
  say(describe(options, transport));
  const cluster = await startCluster(
    { ...options, transport, cacheTokens },
    { log, logLevel, restart: options.restart, proxyPort: options.port, trace: options.trace },
  );
  try {
    say(`sending ${prompts.length} prompts at once through ${cluster.proxy.url}`);
    const run = await checkRun(cluster, {
      ...prepared,
      runId: randomUUID().slice(0, 8),
      atOnce: options.pushLegs !== "prefill-first",
      log,
    });
    const facts: RunFacts = {
      front: "proxy",
      transport: options.transportModule ?? transport,
      backend: cluster.prefills[0]?.backend ?? "none",
      connector: options.connector,
      prefill_tp: options.prefillTp,
      decode_tp: options.decodeTp,
      prefill_platform: options.platformModule ?? options.prefillPlatform ?? "cpu",
      decode_platform: options.platformModule ?? options.decodePlatform ?? "cpu",
    };
    return { run, facts, cluster, modelName };
  } catch (error) {
    await cluster.close();
    throw error;
  }
}

/**
 * Plays a conversation of `turns` turns, and ends the servers.
 * @throws The errors of the parts.
 */
export async function runTurns(
  options: DemoOptions & { readonly turns: number },
  { say, log, logLevel }: DemoOutput,
): Promise<readonly Turn[]> {
  const { turns, maxTokens, trace } = options;
  const transport = await prepareServers(options, say);
  say(`computing the reference tokens of ${turns} turns in this process`);
  const conversation = await prepareConversation(turns, options, { maxTokens, say });
  const longest = (conversation.prompts.at(-1)?.length ?? 0) + maxTokens;
  const extraConfig = { ...READBACK, ...options.extraConfig };
  say(describe(options, transport));
  const cluster = await startCluster(
    // D keeps a turn while it generates the next one, and P keeps a prompt until D has it.
    {
      ...options,
      extraConfig,
      transport,
      readback: true,
      cacheTokens: 3 * (longest + options.decodeBlockSize),
    },
    { log, logLevel, restart: options.restart, proxyPort: options.port, trace },
  );
  try {
    return await playConversation(cluster, conversation);
  } finally {
    await cluster.close();
  }
}

async function prepareServers(
  { trace, transport, transportModule }: DemoOptions,
  say: DemoOutput["say"],
): Promise<TransportName | "module"> {
  if (trace !== undefined) await startFile(trace);
  return transportModule === undefined ? chooseTransport(transport, say) : "module";
}

async function startFile(file: string): Promise<void> {
  await writeFile(file, "", { mode: 0o600 }).catch((cause: unknown) => {
    throw new KvError("KV_CONFIG_INVALID", `--trace ${file} cannot be written: ${String(cause)}`, {
      cause,
    });
  });
}

function describe(options: DemoOptions, transport: TransportName | "module"): string {
  const isSimulated = (platform: string) =>
    platform === "neuron" || (platform === "cuda" && transport === "memory");
  const side = (count: number, role: string, tp: number, blockSize: number, platform = "cpu") =>
    `${count} ${role} (TP ${tp}, block ${blockSize}${platform === "cpu" ? "" : `, ${platform}`}${isSimulated(platform) ? ", simulated" : ""})`;
  const where =
    transport === "nixl"
      ? "each in its own process, over NIXL"
      : transport === "memory"
        ? "in this process, over the embedded transport"
        : `over the transport of ${options.transportModule}`;
  return `starting ${side(options.prefills, "prefill", options.prefillTp, options.prefillBlockSize, options.prefillPlatform)}, ${side(options.decodes, "decode", options.decodeTp, options.decodeBlockSize, options.decodePlatform)} and a proxy, ${where}`;
}
