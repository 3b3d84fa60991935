import { setTimeout as sleep } from "node:timers/promises";
import { createProxy, type ProxySettingsInput } from "@kv/proxy";
import { startCluster } from "../../apps/demo/src/cluster/cluster.js";
import { planProxy } from "../../apps/demo/src/cluster/cluster-plan.js";
import { jsonLog } from "../../apps/demo/src/processes/json-log.js";
import { type CompletionOutcome, complete } from "../../apps/demo/src/run/completion-client.js";
import { tokens } from "./multi-turn/traffic.js";
import { compare, inTurn, median, percentile, type Row } from "./report.js";

/**
 * A forward pass of 512 tokens takes this long, in P and in D, as on an accelerator of the middle
 * class with a model of 8 billion parameters.
 */
const FORWARD_MS_PER_512 = 40;
/**
 * And no pass is shorter than this, as the weights are read for each: so D's steps last as long as
 * on such an accelerator, and the machine's cores do not limit them.
 */
const LEAST_PASS_MS = 8;
const SIMULATED = { layers: 4, kvHeads: 4, headDim: 64, maxModelLen: 4096 } as const;
const BLOCK_TOKENS = 16;
const CACHE_TOKENS = 65_536;
const ROUNDS = 5;
const [CONVERSATIONS, TURNS] = [8, 6];
/**
 * Tokens of a system prompt that all conversations share, of a first question, of a later one, and
 * of an answer.
 */
const [SYSTEM_TOKENS, FIRST_TOKENS, TURN_TOKENS, ANSWER_TOKENS] = [256, 700, 40, 32];
/** Between an answer and the next question. */
const PAUSE_MS = 40;
/** Longer uncached prompts have two legs. */
const ABOVE_TOKENS = 128;
const VOCABULARY = 1000;
const tokensOf = (count: number, seed: number, part: number) =>
  tokens(count, seed, part, VOCABULARY);

/**
 * The disaggregation rule on chats of several turns, against two legs for each request: the same
 * engines, in turn.
 */
export async function disaggregation(): Promise<readonly Row[]> {
  const log = jsonLog("error");
  const options = {
    transport: "nixl",
    connector: "NixlConnector",
    prefills: 1,
    decodes: 2,
    prefillTp: 1,
    decodeTp: 1,
    prefillBlockSize: BLOCK_TOKENS,
    decodeBlockSize: BLOCK_TOKENS,
    cacheTokens: CACHE_TOKENS,
    instance: {
      simulate: {
        ...SIMULATED,
        forwardMsPer512Tokens: FORWARD_MS_PER_512,
        leastPassMs: LEAST_PASS_MS,
      },
      digests: false,
    },
  } as const;
  await using cluster = await startCluster(options, { log, logLevel: "error" });
  const settings = planProxy(cluster.prefills, cluster.decodes, options);
  const routing = { prefill: "round-robin", decode: "prefix-aware" } as const;
  const ways: readonly ProxySettingsInput[] = [
    { ...settings, routing, disaggregateAbove: ABOVE_TOKENS },
    { ...settings, routing },
  ];
  const runs: Run[][] = [[], []];
  // The first round warms up.
  for (let round = 0; round <= ROUNDS; round += 1)
    for (const at of inTurn(round)) {
      const proxy = createProxy({ ...ways[at], log });
      const { url } = await proxy.listen({ port: 0 });
      const run = await converse(url, 10 * round + at, () => sentTo(proxy.status().prefillers));
      await proxy.close();
      if (round > 0) runs[at]?.push(run);
    }
  const values = (what: keyof Run, at: 0 | 1) => (runs[at] ?? []).map((run) => run[what]);
  const row = (what: string, of: keyof Run, unit: string, most: number) =>
    compare(what, [values(of, 0), values(of, 1)], unit, "<=", most);
  const load = `${CONVERSATIONS} conversations of ${TURNS} turns, ${SYSTEM_TOKENS + FIRST_TOKENS} tokens and ${TURN_TOKENS} more each, 1 P, 2 D`;
  return [
    row(`prefill legs, ${load}: the rule / always two legs`, "prefillLegs", "", 0.5),
    row("time to the first token, p50", "ttftMs", "ms", 1),
    row("time per further token, p99 over requests", "decodeMs", "ms", 1.1),
  ];
}

interface Run {
  readonly prefillLegs: number;
  readonly ttftMs: number;
  readonly decodeMs: number;
}

/** Runs all conversations at once; none shares a prefix with one of another `seed`. */
async function converse(url: string, seed: number, prefillLegs: () => number): Promise<Run> {
  const before = prefillLegs();
  const outcomes: CompletionOutcome[] = [];
  const system = tokensOf(SYSTEM_TOKENS, seed, 0);
  await Promise.all(
    Array.from({ length: CONVERSATIONS }, async (_, conversation) => {
      await sleep(conversation * (PAUSE_MS / 2));
      let prompt = [...system, ...tokensOf(FIRST_TOKENS, seed, conversation + 1)];
      for (let turn = 0; turn < TURNS; turn += 1) {
        const requestId = `chat-${seed}-${conversation}-${turn}`;
        const outcome = await complete({
          url,
          requestId,
          promptTokens: prompt,
          maxTokens: ANSWER_TOKENS,
        });
        outcomes.push(outcome);
        prompt = [
          ...prompt,
          ...outcome.tokens,
          ...tokensOf(TURN_TOKENS, seed, 100 * turn + conversation + 17),
        ];
        await sleep(PAUSE_MS);
      }
    }),
  );
  return {
    prefillLegs: prefillLegs() - before,
    ttftMs: median(outcomes.map(({ ttftMs }) => ttftMs)),
    decodeMs: percentile(
      outcomes.map(({ totalMs, ttftMs }) => (totalMs - ttftMs) / (ANSWER_TOKENS - 1)),
      0.99,
    ),
  };
}

function sentTo(instances: readonly { readonly requests: number }[]): number {
  return instances.reduce((sum, { requests }) => sum + requests, 0);
}
