import { setTimeout } from "node:timers/promises";
import { connectionLimits, HttpServer, send } from "@kv/http";
import { KvError, systemClock, systemRandom } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { print, printError } from "@kv/program";
import type { Command } from "commander";
import type { Check } from "../checks/report.js";
import { answerError } from "../headless/prefill-server.js";
import { sendRequest } from "../http/http-request.js";
import type { GivenGroups } from "../protocol/cache-groups.js";
import type { DiffOptions } from "../recording/diff.js";
import { openRecording } from "../recording/recording.js";
import { findingJson, findingLine } from "../watch/findings.js";
import {
  type CanaryReference,
  requireAnswers,
  Watch,
  type WatchedPair,
  type WatchRound,
} from "../watch/watch.js";
import {
  addPeerCommand,
  engineServer,
  fixedPrompt,
  type GroupsOptions,
  givenGroups,
  interruptSignal,
  openSideChannel,
  type ReachOptions,
} from "./options.js";

interface WatchFlags extends ReachOptions, GroupsOptions {
  pair: readonly WatchedPair[];
  against?: string;
  interval: number;
  once?: true;
  promptTokens: number;
  outputTokens: number;
  type?: keyof typeof TOLERANCES;
  tolerance?: number;
  metricsHost: string;
  metricsPort?: number;
  webhook?: string;
  json?: true;
}

/** Another order of additions explains such differences for KV of about 10. */
const TOLERANCES = { float32: 1e-4, float16: 2e-2, bfloat16: 1.5e-1 } as const;
export const WATCH_METRICS_LIMITS = {
  maxConnections: 32,
  maxConnectionsPerAddress: 16,
  maxHeaderBytes: 16 * 1024,
  headerTimeoutMs: 10_000,
  requestTimeoutMs: 10_000,
  idleTimeoutMs: 72_000,
};
const WEBHOOK_TIMEOUT_MS = 10_000;

export function addWatch(program: Command): void {
  addPeerCommand(program, "watch", { pair: readPair }).action(watch);
}

async function watch(flags: WatchFlags): Promise<void> {
  const { prompt, reference, groups } = await readReference(flags);
  await using transport = nixlTransport();
  await using sideChannel = openSideChannel(flags);
  const watching = new Watch({
    pairs: flags.pair,
    reference,
    prompt,
    outputTokens: flags.outputTokens,
    ...comparison(flags),
    groups,
    transport,
    sideChannel,
    sideChannelHost: flags.sideChannelHost,
    sideChannelPort: flags.sideChannelPort,
    random: systemRandom(),
    clock: systemClock(),
  });
  const stop = new AbortController();
  process.once("SIGTERM", () => stop.abort());
  interruptSignal().addEventListener("abort", () => stop.abort());
  const closeMetrics = await serveMetrics(flags, watching);
  try {
    while (!stop.signal.aborted) {
      const startedMs = performance.now();
      const round = await watching.round();
      report(round, flags);
      await Promise.all(round.fresh.map((finding) => post(flags.webhook, finding)));
      if (flags.once === true) {
        requireAnswers(round);
        if (round.findings.length > 0) process.exitCode = 1;
        return;
      }
      const pauseMs = Math.max(0, flags.interval - (performance.now() - startedMs));
      await setTimeout(pauseMs, undefined, { signal: stop.signal }).catch(() => {});
    }
  } finally {
    await closeMetrics();
  }
}

function readPair(text: string): WatchedPair {
  const [prefill = "", decode, ...more] = text.split(",");
  if (more.length > 0)
    throw new KvError(
      "KV_CONFIG_INVALID",
      `--pair ${text} has ${more.length + 2} servers; a pair has one or two`,
    );
  return {
    prefill: engineServer(prefill),
    decode: decode === undefined ? undefined : engineServer(decode),
  };
}

async function readReference(flags: WatchFlags): Promise<{
  readonly prompt: readonly number[];
  readonly reference: CanaryReference | undefined;
  readonly groups: GivenGroups | undefined;
}> {
  const { against, promptTokens } = flags;
  const groups = await givenGroups(flags);
  if (against === undefined)
    return { prompt: fixedPrompt(promptTokens, 0), reference: undefined, groups };
  const recording = await openRecording(against);
  const [first] = recording.manifest.prompts;
  if (first === undefined) throw new KvError("KV_CONFIG_INVALID", `${against} has no prompt`);
  const reference = {
    from: `the recording in ${against}`,
    kv: await recording.kv(first),
    tokens: first.made,
  };
  return { prompt: first.tokens, reference, groups: groups ?? recording.manifest.groups };
}

function comparison({ type, tolerance: given }: WatchFlags): DiffOptions {
  if (type === undefined && given !== undefined)
    throw new KvError("KV_CONFIG_INVALID", `--tolerance is ${given}, and bytes are compared`, {
      hint: `add --type with one of ${Object.keys(TOLERANCES).join(", ")}`,
    });
  return type === undefined ? {} : { valueType: type, tolerance: given ?? TOLERANCES[type] };
}

function report(round: WatchRound, { json }: WatchFlags): void {
  const { number, findings, cost } = round;
  if (json === true) {
    print(`${JSON.stringify({ round: number, findings: findings.map(findingJson), cost })}\n`);
    return;
  }
  for (const finding of findings) print(`${findingLine(finding)}\n`);
  const { durationMs, kvBytes, prompts, promptTokens, outputTokens } = cost;
  const count = `${findings.length} ${findings.length === 1 ? "finding" : "findings"}`;
  print(
    `round ${number}: ${count}; cost ${durationMs.toFixed(0)} ms, ${prompts} prompts of ${promptTokens} tokens, ${outputTokens} output tokens, ${(kvBytes / 1024).toFixed(0)} KiB of KV read\n`,
  );
}

/** The finding was printed before. */
async function post(url: string | undefined, finding: Check): Promise<void> {
  if (url === undefined) return;
  try {
    const { status } = await sendRequest(url, {
      method: "POST",
      body: findingJson(finding),
      timeoutMs: WEBHOOK_TIMEOUT_MS,
    });
    if (status >= 300) printError(`kv-peer: the webhook ${url} answered ${status}\n`);
  } catch (error) {
    const { message } = KvError.from(error, "KV_PROXY_UPSTREAM_FAILED", "the webhook failed");
    printError(`kv-peer: ${message}\n`);
  }
}

async function serveMetrics(
  { metricsHost, metricsPort }: WatchFlags,
  watching: Watch,
): Promise<() => Promise<void>> {
  if (metricsPort === undefined) return async () => {};
  const server = new HttpServer({
    limits: connectionLimits(WATCH_METRICS_LIMITS, 1),
    clock: systemClock(),
    answerError,
    async serve({ request, response, path }) {
      if (request.method === "GET" && path === "/metrics")
        send(response, 200, "text/plain; version=0.0.4", watching.metrics());
      else response.writeHead(404).end();
    },
  });
  const bound = await server.listen(metricsHost, metricsPort);
  printError(`kv-peer: metrics at http://${metricsHost}:${bound}/metrics\n`);
  return () => server.close();
}
