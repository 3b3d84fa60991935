import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import { silentLog } from "@kv/interface";
import { createProxy } from "@kv/proxy";
import { memoryTransport } from "@kv/transport-memory";
import { startCluster } from "../../../apps/demo/src/cluster/cluster.js";
import { type ClusterOptions, planProxy } from "../../../apps/demo/src/cluster/cluster-plan.js";
import { BlockPool } from "../../../apps/demo/src/engine/cache/block-pool.js";
import { KvPool } from "../../../apps/demo/src/engine/cache/kv-pool.js";
import { Engine } from "../../../apps/demo/src/engine/engine.js";
import { loadModel } from "../../../apps/demo/src/model/model.js";
import { writeTinyModel } from "../../../apps/demo/src/model/tiny-model.js";
import { READBACK } from "../../../apps/demo/src/run/turns.js";
import { Replacements } from "./replacements.js";
import {
  AGENTS,
  type BothWays,
  clientOf,
  computedTokens,
  converse,
  type EndedTurn,
  equalTurns,
  readTurns,
  recordRequests,
  SHORT,
  type Traffic,
} from "./traffic.js";

const BLOCK_TOKENS = 16;
const MAX_MODEL_LEN = 8192;
/** Chunks of a prompt: the model takes memory for each token of a chunk times all before. */
const CHUNK_TOKENS = 512;
const SEED = 1;

interface Played {
  readonly turns: readonly EndedTurn[];
  /** Of the turns whose D was there from the begin of the turn before. */
  readonly read: ReturnType<typeof readTurns>;
  readonly computed: number;
  readonly replaced: number;
  /** Streams that had begun, which the client asked for again. */
  readonly failed: number;
  /** Turns that were not read, the first ones too, by reason. */
  readonly reasons: Readonly<Record<string, number>>;
}

/**
 * The conversations through two P and two D of the demo over NIXL, each in its own process, which
 * are replaced in turn; with and without readback, and with one engine. The model is the built-in
 * one, with room for 8,192 tokens.
 */
export async function throughProcesses(): Promise<BothWays<Played> & { readonly every: number }> {
  const isShort = process.argv.includes("--short");
  const [traffic, every] = isShort ? [SHORT, 8] : [AGENTS, 50];
  const model = await mkdtemp(join(tmpdir(), "multi-turn-"));
  try {
    await writeTinyModel(model, { maxModelLen: MAX_MODEL_LEN });
    const reference = await withOneEngine(model, traffic);
    const on = await play(model, traffic, every, true);
    const off = await play(model, traffic, every, false);
    return { traffic, every, on, off, equal: equalTurns(on.turns, reference) };
  } finally {
    await rm(model, { recursive: true, force: true });
  }
}

/** The same conversations with one engine in this process, one prompt after another. */
async function withOneEngine(directory: string, traffic: Traffic): Promise<EndedTurn[]> {
  const model = await loadModel({ directory });
  const transport = memoryTransport();
  const numBlocks = Math.ceil((traffic.conversations * model.config.maxModelLen) / BLOCK_TOKENS);
  const pool = new KvPool({
    transport,
    geometry: model.config,
    numBlocks,
    blockSize: BLOCK_TOKENS,
    tp: 1,
  });
  const blocks = new BlockPool({ numBlocks });
  const engine = new Engine({ model, pool, blocks, maxNumBatchedTokens: CHUNK_TOKENS });
  let sent = 0;
  let last: Promise<unknown> = Promise.resolve();
  const send = async (promptTokens: readonly number[], maxTokens: number) => {
    sent += 1;
    const requestId = `reference-${sent}`;
    const done = last.then(
      () => engine.submit({ requestId, promptTokens, maxTokens, ignoreEos: true }).done,
    );
    last = done;
    const { tokens } = await done;
    return { requestId, tokens: tokens.map(({ token }) => token), ttftMs: 0, totalMs: 0 };
  };
  try {
    return await converse({ send, now: () => 0, sleep: async () => {} }, traffic, SEED);
  } finally {
    await engine.close();
    pool.close();
    await model.close();
    await transport.close();
  }
}

async function play(
  model: string,
  traffic: Traffic,
  every: number,
  isOn: boolean,
): Promise<Played> {
  const options: ClusterOptions = {
    transport: "nixl",
    connector: "NixlConnector",
    prefills: 2,
    decodes: 2,
    prefillTp: 1,
    decodeTp: 1,
    prefillBlockSize: BLOCK_TOKENS,
    decodeBlockSize: BLOCK_TOKENS,
    cacheTokens: 65_536,
    extraConfig: isOn ? READBACK : {},
    model,
    leaseSeconds: 60,
    requestTimeoutSeconds: 30,
    instance: { maxNumBatchedTokens: CHUNK_TOKENS },
    prefillInstance: { prefixCaching: false },
  };
  await using cluster = await startCluster(options, {
    log: silentLog,
    logLevel: "silent",
    restart: true,
  });
  const { records, log } = recordRequests();
  await using proxy = createProxy({
    ...planProxy(cluster.prefills, cluster.decodes, options),
    health: { intervalMs: 500 },
    ...(isOn ? { readback: { cachePercent: 60, minTokens: 1, timeoutMs: 60_000 } } : {}),
    log,
  });
  const { url } = await proxy.listen({ port: 0 });
  const isBack = () => {
    const { prefillers, decoders } = proxy.status();
    return [...prefillers, ...decoders].every(({ available }) => available);
  };
  // A D, a P, the other D, the other P.
  const [[p1, p2], [d1, d2]] = [cluster.prefills, cluster.decodes];
  const victims = [d1, p1, d2, p2].flatMap((member) => {
    const victim = member?.process;
    if (member === undefined || victim === undefined) return [];
    const replace = async () => {
      const replaced = victim.replaced();
      process.kill(victim.pid, "SIGKILL");
      await replaced;
      while (!isBack()) await sleep(50);
    };
    return [{ url: member.url, replace }];
  });
  const replacements = new Replacements(every, victims, clientOf(url, "turn"));
  const turns = await converse(replacements.client, traffic, SEED);
  await replacements.ended();
  const reasons: Record<string, number> = {};
  for (const { readback = "none" } of records.values())
    if (readback !== "used") reasons[readback] = (reasons[readback] ?? 0) + 1;
  const whole = turns.filter((turn) => replacements.hadItsDecode(turn, records));
  return {
    turns,
    read: readTurns(whole, records, BLOCK_TOKENS),
    computed: computedTokens(turns, records),
    replaced: replacements.count,
    failed: replacements.failed,
    reasons,
  };
}
