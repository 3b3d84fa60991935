import { setTimeout as sleep } from "node:timers/promises";
import { silentLog } from "@kv/interface";
import { createProxy } from "@kv/proxy";
import { startCluster } from "../../apps/demo/src/cluster/cluster.js";
import { type ClusterOptions, planProxy } from "../../apps/demo/src/cluster/cluster-plan.js";
import { complete } from "../../apps/demo/src/run/completion-client.js";
import { READBACK } from "../../apps/demo/src/run/turns.js";
import { converse, type EndedTurn, readTurns, recordRequests, type Traffic } from "./traffic.js";

const BLOCK_TOKENS = 16;
/** An instance is replaced after so many requests: each of the four in turn. */
const REPLACED_EVERY = 50;
/** Long conversations of the demo's engines, in blocks of all that hold KV at once. */
const TRAFFIC: Traffic = {
  ...{ conversations: 8, turns: 20, firstTokens: 300, outputTokens: 16, pauseMs: 100 },
  addedTokens: [50, 200, 100, 150, 75],
};

export interface Played {
  readonly turns: readonly EndedTurn[];
  /** Of the turns whose D was there from the begin of the turn before. */
  readonly read: ReturnType<typeof readTurns>;
  readonly replaced: number;
  /** Streams that had begun, which the client asked for again. */
  readonly failed: number;
  /** Turns that were not read, the first ones too, by reason. */
  readonly reasons: Readonly<Record<string, number>>;
}

/** The conversations through two P and two D of the demo over NIXL, each in its own process, one of which is replaced after every 50 requests. */
export async function throughProcesses(isOn: boolean): Promise<Played> {
  const options: ClusterOptions = {
    ...{ transport: "nixl", connector: "NixlConnector", prefills: 2, decodes: 2, prefillTp: 1, decodeTp: 1 },
    ...{ prefillBlockSize: BLOCK_TOKENS, decodeBlockSize: BLOCK_TOKENS, cacheTokens: 131_072 },
    extraConfig: isOn ? READBACK : {},
    ...{ leaseSeconds: 10, requestTimeoutSeconds: 5 },
    instance: {
      simulate: {
        ...{ layers: 4, kvHeads: 4, headDim: 64, maxModelLen: 8192 },
        ...{ forwardMsPer512Tokens: 25.6, leastPassMs: 8 },
      },
      digests: false,
    },
    prefillInstance: { prefixCaching: false },
  };
  await using cluster = await startCluster(options, { log: silentLog, logLevel: "silent", restart: true });
  const { records, log } = recordRequests();
  await using proxy = createProxy({
    ...planProxy(cluster.prefills, cluster.decodes, options),
    health: { intervalMs: 500 },
    ...(isOn ? { readback: { cachePercent: 60, minTokens: 1 } } : {}),
    log,
  });
  const { url } = await proxy.listen({ port: 0 });
  const members = [...cluster.prefills, ...cluster.decodes];
  let [sent, replaced, failed] = [0, 0, 0];
  const replacing: Promise<void>[] = [];
  const ends: { readonly url: string; readonly atMs: number }[] = [];
  const send = async (prompt: readonly number[], maxTokens: number) => {
    sent += 1;
    const requestId = `turn-${sent}`;
    if (sent % REPLACED_EVERY === 0) {
      const victim = members[replaced % members.length];
      replaced += 1;
      if (victim?.process !== undefined) {
        replacing.push(victim.process.replaced());
        ends.push({ url: victim.url, atMs: performance.now() });
        process.kill(victim.process.pid, "SIGKILL");
      }
    }
    const ask = (id: string) => complete({ url, requestId: id, promptTokens: prompt, maxTokens });
    try {
      return await ask(requestId);
    } catch {
      // A stream that had begun: the client asks again.
      failed += 1;
      return await ask(`${requestId}-again`);
    }
  };
  const client = { send, sleep: (ms: number) => sleep(ms), now: () => performance.now() };
  const turns = await converse(client, TRAFFIC, 1);
  await Promise.all(replacing);
  const reasons: Record<string, number> = {};
  for (const { readback = "none" } of records.values())
    if (readback !== "used") reasons[readback] = (reasons[readback] ?? 0) + 1;
  const hadItsDecode = ({ before, endedAtMs }: EndedTurn) => {
    if (before === undefined) return true;
    const decode = records.get(before.requestId)?.decode;
    return !ends.some(
      ({ url: ended, atMs }) => ended === decode && atMs >= before.startedAtMs && atMs <= endedAtMs,
    );
  };
  const read = readTurns(turns.filter(hadItsDecode), records, BLOCK_TOKENS);
  return { turns, read, replaced, failed, reasons };
}
