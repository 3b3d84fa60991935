import { setTimeout as sleep } from "node:timers/promises";
import { silentLog } from "@kv/interface";
import { freePort } from "@kv/testing/http/listening";
import { memoryNetwork, memorySideChannel, memoryTransport } from "@kv/transport-memory";
import { startCluster } from "../../../apps/demo/src/cluster/cluster.js";
import {
  type ClusterOptions,
  planInstances,
  planProxy,
} from "../../../apps/demo/src/cluster/cluster-plan.js";
import { startInstance } from "../../../apps/demo/src/instance/instance.js";
import { readInstanceConfig } from "../../../apps/demo/src/instance/instance-config.js";
import { syntheticPrompts } from "../../../apps/demo/src/run/prepare-run.js";
import { startRelayed } from "../../../apps/demo/test/support/relayed-instance.js";
import type { InstanceSpecInput } from "../../../packages/fleet/src/instances/instance-spec.js";
import { publishEvents } from "../../bench/upstream-answers.js";
import type { PartOptions } from "../main.js";
import { ObservedProcess } from "../observed-process.js";
import type { Check } from "../row.js";
import { ask, askAlone, type SoakRequest, sameAnswer, soakRequests } from "./requests.js";
import { allAvailable, Cut, changeInstance, endProxy, send, soak, Tally } from "./soak.js";

interface Member {
  readonly name: string;
  readonly url: string;
  readonly spec: Exclude<InstanceSpecInput, string>;
  restart(signal: "SIGKILL" | "SIGTERM"): Promise<void>;
}

const PROMPTS = 8;
/** More than a lease and a request's time limit together, twice. */
const LATE_MS = 60_000;
const IDLE_MS = 40_000;

const anyOf = <T>(list: readonly T[]) => list[Math.floor(Math.random() * list.length)] as T;

/**
 * Requests of all routes through kv-proxy to two P and two D, whose answers are those of one
 * engine. Instances are killed, drain at SIGTERM, or are replaced. The KV events of the first P are
 * lies. A request that has received no byte is tried again, so none may fail; an answer may break
 * off only when an instance ends.
 */
export async function engineSoak(
  transport: "memory" | "nixl",
  options: PartOptions,
): Promise<Check[]> {
  const cluster: ClusterOptions = {
    transport,
    connector: options.connector,
    prefills: 2,
    decodes: 2,
    tinyKvHeads: 4,
    prefillTp: 2,
    decodeTp: 1,
    prefillBlockSize: 16,
    decodeBlockSize: 32,
    cacheTokens: 16_384,
    leaseSeconds: 6,
    requestTimeoutSeconds: 10,
  };
  const prompts = syntheticPrompts({ count: PROMPTS, vocabSize: 1024, maxTokens: 512 });
  const requests = soakRequests(prompts);
  const wanted = await answersOfOne(requests);
  const { members, close } = await startMembers(cluster);
  const lies = JSON.parse(await publishEvents(prompts[0])) as {
    0: { endpoint: string; replay_endpoint: string };
  };
  const specOf = ({ name, spec }: Member) =>
    name === "prefill-0"
      ? { ...spec, kvEvents: lies[0].endpoint, kvEventsReplay: lies[0].replay_endpoint }
      : spec;
  const roleOf = ({ name }: Member) => (name.startsWith("prefill") ? "prefill" : "decode");
  const specsOf = (role: "prefill" | "decode") =>
    members.filter((member) => roleOf(member) === role).map(specOf);
  const adminPort = await freePort();
  const adminUrl = `http://127.0.0.1:${adminPort}`;
  const settings = {
    ...planProxy([], [], { ...cluster, adminPort }),
    prefillers: specsOf("prefill"),
    decoders: specsOf("decode"),
    routing: { prefill: "prefix-aware", decode: "prefix-aware" },
    health: { intervalMs: 500 },
    // The side channels of the memory transport are in this process.
    ...(transport === "memory" ? { pairing: { mode: "off" } } : {}),
  };
  const args = ["proxy", "--log-level", "error", "--config", JSON.stringify(settings)];
  const proxy = new ObservedProcess("apps/demo/dist/main.js", args);
  const { url } = JSON.parse(await proxy.line()) as { url: string };

  const tally = new Tally();
  const running = new Set<Promise<void>>();
  let serial = 0;
  /** When the last one that died was back. */
  let goneUntilMs = 0;

  async function one() {
    serial += 1;
    const at = Math.floor(Math.random() * requests.length);
    const [request, expected] = [requests[at], wanted[at]];
    if (request === undefined || expected === undefined) return;
    const begunAtMs = Date.now();
    const chance = Math.random();
    const leaves = chance < 0.15;
    const signal = AbortSignal.timeout(leaves ? Math.ceil(300 * Math.random()) : LATE_MS);
    const pauseMs = chance > 0.85 ? 50 * Math.random() : 0;
    const stream = Math.random() < 0.6;
    const usage = stream && chance < 0.5 ? { stream_options: { include_usage: true } } : {};
    const asked = request.body && { ...request, body: { ...request.body, stream, ...usage } };
    const wrong = (what: "different" | "failed" | "late", reason: unknown) =>
      tally.add(what, `request ${at} (${request.path}, stream ${stream}): ${reason}`);
    try {
      const send = { signal, requestId: `soak-${serial}`, pauseMs };
      const told = await ask(url, asked ?? request, send);
      if (sameAnswer(told, expected)) tally.add("equal");
      else if (told.status === expected.status)
        wrong("different", JSON.stringify([told, expected]).slice(0, 2000));
      // What an engine does not serve, the one that has ended may have served.
      else if (told.status === 502 && expected.status === 404 && goneUntilMs > begunAtMs)
        tally.add("unsure");
      else wrong("failed", `${told.status} ${told.said}`);
    } catch (error) {
      if (leaves && signal.aborted) tally.add("left");
      else if (signal.aborted) wrong("late", error);
      else if (error instanceof Cut && goneUntilMs > begunAtMs) tally.add("cut");
      else wrong("failed", error);
    }
  }

  async function client() {
    const asked = one();
    running.add(asked);
    await asked;
    running.delete(asked);
  }

  async function change() {
    const member = anyOf(members);
    const instance = [roleOf(member), specOf(member)] as const;
    const what = anyOf(["killed", "terminated", "rollouts"]);
    // A leg is repeated once: no request meets two ends.
    const met = [...running];
    if (what === "rollouts") await changeInstance(adminUrl, "drain", ...instance);
    else goneUntilMs = Number.POSITIVE_INFINITY;
    await member.restart(what === "killed" ? "SIGKILL" : "SIGTERM");
    if (what === "rollouts") await changeInstance(adminUrl, "add", ...instance);
    tally.add(what);
    await allAvailable(adminUrl);
    if (what !== "rollouts") goneUntilMs = Date.now();
    await Promise.all(met);
  }

  const memory = await soak(options, proxy, client, change);
  let held: string[] = [];
  for (const until = Date.now() + IDLE_MS; Date.now() < until; await sleep(200)) {
    held = (await Promise.all(members.map(heldBy))).flat();
    if (held.length === 0) break;
  }
  const end = await endProxy(proxy, url);
  await close();
  return [
    ...tally.checks("equal", ["different", "late", "failed"]),
    ...memory,
    ...end,
    [`held: ${held.join()}`, held.length === 0],
  ];
}

async function answersOfOne(requests: readonly SoakRequest[]) {
  const network = memoryNetwork();
  const config = readInstanceConfig({
    role: "both",
    tinyKvHeads: 4,
    sideChannelHost: "alone",
    kvTransferConfig: { kv_connector: "NixlConnector", kv_role: "kv_both" },
  });
  await using alone = await startInstance(config, {
    log: silentLog,
    transport: memoryTransport({ network, host: "alone" }),
    sideChannel: memorySideChannel({ network, host: "alone" }),
  });
  const answers = [];
  for (const request of requests) answers.push(await askAlone(alone.url, request));
  return answers;
}

async function startMembers(
  options: ClusterOptions,
): Promise<{ members: readonly Member[]; close(): Promise<unknown> }> {
  if (options.transport === "memory") {
    const network = memoryNetwork();
    const { prefills, decodes } = planInstances(options);
    const relayed = await Promise.all(
      [...prefills, ...decodes].map((one) => startRelayed(one, network)),
    );
    return {
      members: relayed.map((one) => ({
        ...one,
        spec: { url: one.url },
        async restart(signal) {
          await one.kill(signal);
          await one.start();
        },
      })),
      close: () => Promise.all(relayed.map((one) => one.end())),
    };
  }
  const logging = { log: silentLog, logLevel: "silent", restart: true } as const;
  const cluster = await startCluster(options, logging);
  const members = [...cluster.prefills, ...cluster.decodes].map(
    ({ name, url, sideChannel, process: victim }) => {
      if (victim === undefined || sideChannel == null) throw new Error(`${name} has no process`);
      return {
        name,
        url,
        spec: { url, kv: { host: sideChannel.host, port: sideChannel.port } },
        restart(signal: NodeJS.Signals) {
          const replaced = victim.replaced();
          process.kill(victim.pid, signal);
          return replaced;
        },
      };
    },
  );
  return { members, close: () => cluster.close() };
}

async function heldBy({ name, url }: Member): Promise<string[]> {
  const status = JSON.parse((await send(`${url}/status`, undefined)).text) as {
    outstanding: Record<string, number>;
  };
  return Object.entries(status.outstanding)
    .filter(([what, count]) => what !== "listeners" && count !== 0)
    .map(([what, count]) => `${name}: ${count} ${what}`);
}
