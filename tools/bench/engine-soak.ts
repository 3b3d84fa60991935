// npm run soak:proxy -- --engines memory|nixl [--connector NixlPushConnector]: requests of all
// routes through kv-proxy to two P and two D of the demo, whose answers are those of one engine.
// Clients stream, read slowly, or leave. Instances end as by SIGKILL, drain at SIGTERM, or are
// replaced in a rollout, one after the other. The KV events of the first P are lies. A request that
// has received no byte is tried again, so none of them may fail; an answer may break off only when
// an instance ends. At the end no engine holds anything and no request is in flight.
import { setTimeout as sleep } from "node:timers/promises";
import { silentLog } from "@kv/interface";
import { memoryNetwork, memorySideChannel, memoryTransport } from "@kv/transport-memory";
import { startCluster } from "../../apps/demo/src/cluster/cluster.js";
import {
  type ClusterOptions,
  planInstances,
  planProxy,
} from "../../apps/demo/src/cluster/cluster-plan.js";
import { startInstance } from "../../apps/demo/src/instance/instance.js";
import { readInstanceConfig } from "../../apps/demo/src/instance/instance-config.js";
import { startChild } from "../../apps/demo/src/processes/child-process.js";
import { syntheticPrompts } from "../../apps/demo/src/run/prepare-run.js";
import { startRelayed } from "../../apps/demo/test/support/relayed-instance.js";
import type { InstanceSpecInput } from "../../packages/fleet/src/instances/instance-spec.js";
import { freePort, watchMemory } from "./child-processes.js";
import { allAvailable, change, inFlightAtEnd, Reasons } from "./soak-admin.js";
import { ask, askAlone, Cut, sameAnswer, soakRequests } from "./soak-requests.js";
import { publishEvents } from "./upstream-answers.js";

export interface EngineSoak {
  readonly transport: "memory" | "nixl";
  readonly connector: string;
  readonly durationMs: number;
  readonly everyMs: number;
  readonly clients: number;
}

/** An instance that ends, and starts again at its address. */
interface Member {
  readonly name: string;
  readonly url: string;
  readonly spec: Exclude<InstanceSpecInput, string>;
  kill(signal: "SIGKILL" | "SIGTERM"): Promise<void>;
  /** Resolves when it has started again. */
  back(): Promise<void>;
}

const PROMPTS = 8;
/** More than a lease and a request's time limit together, twice: a request may begin again. */
const LATE_MS = 60_000;
const IDLE_MS = 40_000;
const GROWTH_LIMIT = 1.25;

/** Returns whether all was well, and prints the counts. */
export async function engineSoak(soak: EngineSoak): Promise<boolean> {
  const { transport, connector, durationMs, everyMs, clients } = soak;
  const options: ClusterOptions = {
    transport,
    connector,
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
  const { members, close } = await startMembers(options);
  const lies = JSON.parse(await publishEvents(prompts[0])) as {
    0: { endpoint: string; replay_endpoint: string };
  };
  const specOf = ({ name, spec }: Member) =>
    name === "prefill-0"
      ? { ...spec, kvEvents: lies[0].endpoint, kvEventsReplay: lies[0].replay_endpoint }
      : spec;
  const adminPort = await freePort();
  const adminUrl = `http://127.0.0.1:${adminPort}`;
  const settings = {
    ...planProxy([], [], { ...options, adminPort }),
    prefillers: members.filter(({ name }) => name.startsWith("prefill")).map(specOf),
    decoders: members.filter(({ name }) => name.startsWith("decode")).map(specOf),
    routing: { prefill: "prefix-aware", decode: "prefix-aware" },
    health: { intervalMs: 500 },
    // The side channels of the memory transport are in this process.
    ...(transport === "memory" ? { pairing: { mode: "off" } } : {}),
  };
  const args = ["proxy", "--log-level", "error", "--config", JSON.stringify(settings)];
  const proxy = await startChild({ name: "proxy", args });
  const memory = watchMemory(proxy.pid);

  const counts = {
    equal: 0,
    different: 0,
    left: 0,
    late: 0,
    failed: 0,
    cut: 0,
    unsure: 0,
    killed: 0,
    terminated: 0,
    rollouts: 0,
    slowest_ms: 0,
  };
  const why = new Reasons();
  const endAtMs = Date.now() + durationMs;
  const running = new Set<Promise<void>>();
  let serial = 0;
  /** When the last one that died was back. */
  let goneUntilMs = 0;

  async function one(): Promise<void> {
    serial += 1;
    const at = Math.floor(Math.random() * requests.length);
    const [request, expected] = [requests[at], wanted[at]];
    if (request === undefined || expected === undefined) return;
    const [chance, requestId, begunAtMs] = [Math.random(), `soak-${serial}`, Date.now()];
    const leaves = chance < 0.15;
    const pauseMs = chance > 0.85 ? 50 * Math.random() : 0;
    const signal = AbortSignal.timeout(leaves ? Math.ceil(300 * Math.random()) : LATE_MS);
    const stream = Math.random() < 0.6;
    const usage = stream && chance < 0.5 ? { stream_options: { include_usage: true } } : {};
    const asked = request.body && { ...request, body: { ...request.body, stream, ...usage } };
    // What was wrong, and why the client says so.
    const wrong = (what: "different" | "failed" | "late", reason: string) => {
      counts[what] += 1;
      const kind = `${request.path} of ${requests.length / PROMPTS}: ${at % (requests.length / PROMPTS)}`;
      why.add(`${what} (${kind}, stream ${stream}): ${reason.replaceAll(/soak-\d+/g, "")}`);
    };
    try {
      const told = await ask(proxy.url, asked ?? request, { signal, requestId, pauseMs });
      counts.slowest_ms = Math.max(counts.slowest_ms, Date.now() - begunAtMs);
      if (sameAnswer(told, expected)) counts.equal += 1;
      else if (told.status === expected.status)
        wrong("different", JSON.stringify([told, expected]).slice(0, 2000));
      // What an engine does not serve, the one that has ended may have served.
      else if (told.status === 502 && expected.status === 404 && goneUntilMs > begunAtMs)
        counts.unsure += 1;
      else wrong("failed", `${told.status} ${told.said}`);
    } catch (error) {
      if (leaves && signal.aborted) counts.left += 1;
      else if (signal.aborted) wrong("late", String(error));
      else if (error instanceof Cut && goneUntilMs > begunAtMs) counts.cut += 1;
      else wrong("failed", String(error));
    }
  }
  async function client(): Promise<void> {
    while (Date.now() < endAtMs) {
      const asked = one();
      running.add(asked);
      await asked;
      running.delete(asked);
    }
  }
  async function chaos(): Promise<void> {
    while (Date.now() + everyMs < endAtMs) {
      await sleep(everyMs * Math.random());
      const member = members[Math.floor(Math.random() * members.length)];
      if (member === undefined) return;
      const role = member.name.startsWith("prefill") ? "prefill" : "decode";
      const what = (["killed", "terminated", "rollouts"] as const)[Math.floor(3 * Math.random())];
      // A leg is repeated once: no request meets two ends.
      const met = [...running];
      if (what === "rollouts")
        while ((await change(adminUrl, "drain", role, specOf(member))) > 0) await sleep(20);
      else goneUntilMs = Number.POSITIVE_INFINITY;
      await member.kill(what === "killed" ? "SIGKILL" : "SIGTERM");
      await member.back();
      if (what === "rollouts") await change(adminUrl, "add", role, specOf(member));
      counts[what ?? "killed"] += 1;
      while (!(await allAvailable(adminUrl))) await sleep(50);
      if (what !== "rollouts") goneUntilMs = Date.now();
      await Promise.all(met);
    }
  }

  await Promise.all([chaos(), ...Array.from({ length: clients }, client)]);
  const { early, late } = memory.ended();
  let held: string[] = [];
  for (const until = Date.now() + IDLE_MS; Date.now() < until; await sleep(200)) {
    held = (await Promise.all(members.map(heldBy))).flat();
    if (held.length === 0) break;
  }
  const inFlight = await inFlightAtEnd(proxy.url);
  await proxy.stop();
  const ended = await proxy.ended;
  await close();
  const sizes = { early_mib: Math.round(early), late_mib: Math.round(late) };
  console.log(
    JSON.stringify({ transport, connector, ...counts, in_flight: inFlight, held, ...sizes, ended }),
  );
  why.print((reason, count) => `${count} ${reason}`);
  const { equal, different, failed } = counts;
  return (
    equal > 0 &&
    different + failed + counts.late + inFlight + held.length === 0 &&
    late / early <= GROWTH_LIMIT
  );
}

/** What one engine alone answers to each request. */
async function answersOfOne(requests: ReturnType<typeof soakRequests>) {
  const network = memoryNetwork();
  const kvTransferConfig = { kv_connector: "NixlConnector", kv_role: "kv_both" };
  const config = {
    role: "both",
    tinyKvHeads: 4,
    sideChannelHost: "alone",
    kvTransferConfig,
  } as const;
  await using alone = await startInstance(readInstanceConfig(config), {
    log: silentLog,
    transport: memoryTransport({ network, host: "alone" }),
    sideChannel: memorySideChannel({ network, host: "alone" }),
  });
  const answers = [];
  for (const request of requests) answers.push(await askAlone(alone.url, request));
  return answers;
}

/** Starts two P and two D: over NIXL each in its own process, else in this one. */
async function startMembers(
  options: ClusterOptions,
): Promise<{ members: Member[]; close(): Promise<void> }> {
  if (options.transport === "memory") {
    const network = memoryNetwork();
    const { prefills, decodes } = planInstances(options);
    const relayed = await Promise.all(
      [...prefills, ...decodes].map((one) => startRelayed(one, network)),
    );
    const members = relayed.map((one) => ({ ...one, spec: { url: one.url }, back: one.start }));
    return {
      members,
      close: async () => void (await Promise.all(relayed.map((one) => one.end()))),
    };
  }
  const cluster = await startCluster(options, {
    log: silentLog,
    logLevel: "silent",
    restart: true,
  });
  const members = [...cluster.prefills, ...cluster.decodes].map(
    ({ name, url, sideChannel, process: victim }) => {
      let [replaced, pid] = [Promise.resolve(), 0];
      if (victim === undefined || sideChannel == null) throw new Error(`${name} has no process`);
      return {
        name,
        url,
        spec: { url, kv: { host: sideChannel.host, port: sideChannel.port } },
        async kill(signal: NodeJS.Signals) {
          replaced = victim.replaced();
          pid = victim.pid;
          process.kill(pid, signal);
          while (isAlive(pid)) await sleep(20);
        },
        back: () => replaced,
      };
    },
  );
  return { members, close: () => cluster.close() };
}

function isAlive(pid: number): boolean {
  try {
    return process.kill(pid, 0);
  } catch {
    return false;
  }
}

/** What an instance has not released. */
async function heldBy({ name, url }: Member): Promise<string[]> {
  const status = (await (await fetch(`${url}/status`)).json()) as {
    outstanding: Record<string, number>;
  };
  return Object.entries(status.outstanding)
    .filter(([what, count]) => what !== "listeners" && count !== 0)
    .map(([what, count]) => `${name}: ${count} ${what}`);
}
