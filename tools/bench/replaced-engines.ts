// What is computed again when instances are replaced, with a pool and without: the demo's engines
// over NIXL, with a model that is slow beside this process, which also moves the KV.
import { setTimeout as sleep } from "node:timers/promises";
import { type LogFields, silentLog } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { openPool, type Pool } from "@kv/pool";
import { createProxy } from "@kv/proxy";
import { zmqSideChannel } from "@kv/side-channel";
import { freePorts } from "@kv/testing/free-ports";
import { planInstances } from "../../apps/demo/src/cluster/cluster-plan.js";
import type { CacheChange } from "../../apps/demo/src/engine/cache/block-pool.js";
import { startInstance } from "../../apps/demo/src/instance/instance.js";
import { readInstanceConfig } from "../../apps/demo/src/instance/instance-config.js";
import { startEventPublisher } from "../../packages/fleet/test/support/event-publisher.js";
import { servePool } from "../vllm/serve-pool.js";
import { converse, type EndedTurn, type Send, sendTo, type Traffic } from "./conversations.js";
import { BLOCK_TOKENS, ONE_PAIR } from "./deployments.js";

export const INSTANCES = 4;
export const REPLACED_EVERY = 50;
const SIMULATED = {
  layers: 4,
  kvHeads: 1,
  headDim: 8,
  maxModelLen: 8192,
  forwardMsPer512Tokens: 512,
} as const;
const CACHE_TOKENS = 80_000;
/** Until an instance ends that has left. */
const GRACE_MS = 1000;

export interface Replaced {
  readonly turns: readonly EndedTurn[];
  readonly replacements: number;
  readonly computed: number;
  /** Beyond what no instance had computed before. */
  readonly computedAgain: number;
}

/** Instances of one host, each at its own address of the loopback. */
async function openHosts() {
  const [http = 0, tierPort = 0, events = 0] = await freePorts(3);
  const transports = new Set<ReturnType<typeof nixlTransport>>();
  const start = async (role: "prefill" | "decode", host: string) => {
    const { prefills, decodes } = planInstances({
      ...ONE_PAIR,
      transport: "nixl",
      cacheTokens: role === "prefill" ? CACHE_TOKENS : 3 * CACHE_TOKENS,
      instance: { simulate: SIMULATED, digests: false, host, sideChannelHost: host, port: http },
      prefillInstance: { tierPort },
    });
    const [planned] = role === "prefill" ? prefills : decodes;
    const endpoint = `tcp://${host}:${events}`;
    const publisher = role === "prefill" ? await startEventPublisher({ at: endpoint }) : undefined;
    let published = Promise.resolve();
    const transport = nixlTransport();
    transports.add(transport);
    const instance = await startInstance(readInstanceConfig(planned?.config), {
      log: silentLog,
      transport,
      sideChannel: zmqSideChannel(),
      onCacheChange: (change) => {
        published = published.then(() => publisher?.publish([kvEventOf(change)]));
      },
    });
    return {
      ...instance,
      spec: { url: instance.url, kvEvents: endpoint, kvEventsReplay: publisher?.replayEndpoint },
      computed: () => computedTokens(instance.metrics()),
      async close() {
        await instance.close();
        await published;
        publisher?.close();
      },
    };
  };
  const engineAt = (host: string) => ({
    peerId: `${host}:${tierPort}`,
    events: { endpoint: `tcp://${host}:${events}`, replayEndpoint: undefined },
  });
  return { start, tierPort, engineAt };
}

type Host = Awaited<ReturnType<Awaited<ReturnType<typeof openHosts>>["start"]>>;

/** As vLLM publishes it. */
function kvEventOf(change: CacheChange): object {
  const bytes = (hash: string) => Buffer.from(hash, "base64");
  if ("removed" in change)
    return { type: "BlockRemoved", block_hashes: [bytes(change.removed)], medium: "GPU" };
  const { stored, first, tokens } = change;
  const before = stored[first - 1];
  return {
    type: "BlockStored",
    block_hashes: stored.slice(first).map(bytes),
    parent_block_hash: before === undefined ? null : bytes(before),
    token_ids: tokens.slice(first * BLOCK_TOKENS, stored.length * BLOCK_TOKENS),
    block_size: BLOCK_TOKENS,
    lora_id: null,
    medium: "GPU",
    lora_name: null,
  };
}

export function computedTokens(metrics: string): number {
  const sample = /^vllm:prompt_tokens_by_source_total\{[^}]*source="local_compute"[^}]*\} (\S+)/gm;
  return Array.from(metrics.matchAll(sample), ([, count]) => Number(count)).reduce(
    (sum, count) => sum + count,
    0,
  );
}

/** Whole blocks of a turn's prompt are cached for the next one. */
function neededTokens(turns: readonly EndedTurn[]): number {
  const held = new Map<number, number>();
  let needed = 0;
  for (const { conversation, promptTokens } of turns) {
    needed += promptTokens - (held.get(conversation) ?? 0);
    held.set(conversation, promptTokens - (promptTokens % BLOCK_TOKENS));
  }
  return needed;
}

/** Holds conversations while every so many requests one of the prefill instances is replaced. */
export async function converseWhileReplaced(hasPool: boolean, traffic: Traffic): Promise<Replaced> {
  const { start, tierPort, engineAt } = await openHosts();
  const hosts = Array.from({ length: INSTANCES }, (_, at) => `127.0.0.${at + 10}`);
  const running = new Map<string, Host>();
  for (const host of hosts) running.set(host, await start("prefill", host));
  const decode = await start("decode", "127.0.0.9");
  const closers: (() => Promise<unknown>)[] = [() => decode.close()];
  let pool: Pool | undefined;
  let poolUrl: string | undefined;
  if (hasPool) {
    const status = [...running.values()][0]?.status() as {
      readonly p2p_tier: {
        readonly block_length_bytes: number;
        readonly fingerprint: string;
        readonly hash_seed: string;
      };
    };
    const { block_length_bytes: blockLengthBytes, fingerprint, hash_seed } = status.p2p_tier;
    const transport = nixlTransport();
    pool = await openPool({
      transport,
      host: "127.0.0.1",
      port: 0,
      memoryBytes: 2 ** 26,
      engines: hosts.map(engineAt),
      writeThrough: true,
      blockLengthBytes,
      fingerprint,
      hashSeed: hash_seed,
    });
    const { admin, url } = await servePool(pool);
    poolUrl = url;
    closers.push(
      () => transport.close(),
      () => pool?.close() ?? Promise.resolve(),
      () => admin.close(),
    );
  }
  const warn = (event: string, fields: LogFields = {}) => console.error(event, fields);
  const proxy = createProxy({
    prefillers: [...running.values()].map(({ spec }) => spec),
    decoders: [decode.url],
    mode: "pull",
    pairing: { mode: "off" },
    routing: { prefill: "prefix-aware" },
    ...(poolUrl === undefined ? {} : { kvSources: { pools: [poolUrl], tierPort } }),
    log: { ...silentLog, warn, error: warn },
  });
  const { url } = await proxy.listen({ port: 0 });
  closers.push(() => proxy.close({ graceMs: 0 }));

  let computed = 0;
  let replacements = 0;
  const { prefill } = proxy.instances;
  const replace = async () => {
    const host = hosts[replacements % hosts.length] as string;
    const left = running.get(host) as Host;
    replacements += 1;
    await prefill.remove({ url: left.url });
    // Others fetch from it what they were told to before.
    await sleep(GRACE_MS);
    computed += left.computed();
    await left.close();
    const joined = await start("prefill", host);
    running.set(host, joined);
    prefill.add(joined.spec);
  };
  let replacing = Promise.resolve();
  let sent = 0;
  const through = sendTo(url, hasPool ? "pool" : "alone");
  const send: Send = (prompt, maxTokens) => {
    sent += 1;
    if (sent % REPLACED_EVERY === 0) replacing = replacing.then(replace);
    return through(prompt, maxTokens);
  };
  try {
    const turns = await converse(send, traffic, 1);
    await replacing;
    await sleep(100);
    for (const each of running.values()) computed += each.computed();
    const computedAgain = computed - neededTokens(turns);
    return { turns, replacements, computed, computedAgain };
  } finally {
    for (const close of closers.reverse()) await close();
    for (const each of running.values()) await each.close();
  }
}
