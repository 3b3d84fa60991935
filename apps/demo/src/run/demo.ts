import { randomUUID } from "node:crypto";
import { writeFile } from "node:fs/promises";
import type { LogLevel } from "@kv/fleet/front-end";
import { KvError, type Log } from "@kv/interface";
import { chooseTransport, type TransportName } from "../cluster/choose-transport.js";
import { type Cluster, startCluster } from "../cluster/cluster.js";
import type { ClusterOptions } from "../cluster/cluster-plan.js";
import { type CheckedRun, checkRun } from "./check-run.js";
import { prepareRun } from "./prepare-run.js";
import type { RunFacts } from "./report.js";
import { playConversation, prepareConversation, READBACK, type Turn } from "./turns.js";

export interface DemoOptions extends Omit<ClusterOptions, "transport" | "cacheTokens"> {
  readonly transport?: TransportName | undefined;
  readonly requests?: number | undefined;
  readonly promptsFile?: string | undefined;
  readonly maxTokens: number;
  /** Keep running, and restart a server that ends. */
  readonly keep: boolean;
  readonly port: number;
  /** File for the spans of all servers; what it holds is overwritten. */
  readonly trace?: string | undefined;
  readonly logLevel: LogLevel;
}

export interface DemoOutput {
  readonly say: (line: string) => void;
  readonly log: Log;
}

export interface DemoRun {
  readonly run: CheckedRun;
  readonly facts: RunFacts;
  /** Still running: the caller closes it. */
  readonly cluster: Cluster;
  readonly modelName: string;
}

/**
 * Runs the demo: reference tokens, servers, requests, comparison.
 * @throws The errors of the parts; the cluster is closed then.
 */
export async function runDemo(options: DemoOptions, output: DemoOutput): Promise<DemoRun> {
  const transport = await prepareServers(options, output);
  const prepared = await prepareRun(options, output.say);
  const { prompts, modelName } = prepared;
  const ofPrompt = options.maxTokens + options.decodeBlockSize;
  const cacheTokens = prompts.reduce((sum, prompt) => sum + prompt.length + ofPrompt, 0);
  const cluster = await startServers({ ...options, transport, cacheTokens }, output);
  try {
    output.say(`sending ${prompts.length} prompts at once through ${cluster.proxy.url}`);
    const run = await checkRun(cluster, {
      ...prepared,
      runId: randomUUID().slice(0, 8),
      atOnce: options.pushLegs !== "prefill-first",
      log: output.log,
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
  turns: number,
  options: DemoOptions,
  output: DemoOutput,
): Promise<readonly Turn[]> {
  const { maxTokens } = options;
  const { say } = output;
  const transport = await prepareServers(options, output);
  say(`computing the reference tokens of ${turns} turns in this process`);
  const conversation = await prepareConversation(turns, options, { maxTokens, say });
  const longest = (conversation.prompts.at(-1)?.length ?? 0) + maxTokens;
  await using cluster = await startServers(
    {
      ...options,
      extraConfig: { ...READBACK, ...options.extraConfig },
      transport,
      readback: true,
      // D keeps a turn while it generates the next one, and P keeps a prompt until D has it.
      cacheTokens: 3 * (longest + options.decodeBlockSize),
    },
    output,
  );
  return await playConversation(cluster, conversation);
}

async function prepareServers(
  { trace, transport, transportModule }: DemoOptions,
  { say }: DemoOutput,
): Promise<ClusterOptions["transport"]> {
  if (trace !== undefined)
    await writeFile(trace, "", { mode: 0o600 }).catch((cause: unknown) => {
      const message = `--trace ${trace} cannot be written: ${String(cause)}`;
      throw new KvError("KV_CONFIG_INVALID", message, { cause });
    });
  return transportModule === undefined ? chooseTransport(transport, say) : "module";
}

function startServers(
  options: Omit<DemoOptions, "transport"> & ClusterOptions,
  { say, log }: DemoOutput,
): Promise<Cluster> {
  const { transport, logLevel, keep: restart, port: proxyPort, trace } = options;
  const isSimulated = (platform: string) =>
    platform === "neuron" || (platform === "cuda" && transport === "memory");
  const side = (count: number, role: string, tp: number, blockSize: number, platform = "cpu") =>
    `${count} ${role} (TP ${tp}, block ${blockSize}${platform === "cpu" ? "" : `, ${platform}`}${isSimulated(platform) ? ", simulated" : ""})`;
  const where = {
    nixl: "each in its own process, over NIXL",
    memory: "in this process, over the embedded transport",
    module: `over the transport of ${options.transportModule}`,
  };
  say(
    `starting ${side(options.prefills, "prefill", options.prefillTp, options.prefillBlockSize, options.prefillPlatform)}, ${side(options.decodes, "decode", options.decodeTp, options.decodeBlockSize, options.decodePlatform)} and a proxy, ${where[transport]}`,
  );
  return startCluster(options, { log, logLevel, restart, proxyPort, trace });
}
