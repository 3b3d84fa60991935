import { createProxy } from "@kv/proxy";
import { startCluster } from "../../apps/demo/src/cluster/cluster.js";
import { planProxy } from "../../apps/demo/src/cluster/cluster-plan.js";
import { jsonLog } from "../../apps/demo/src/processes/json-log.js";
import { clientOf, converse, type EndedTurn, type Traffic } from "./conversations.js";
import { ONE_PAIR, SIMULATED } from "./deployments.js";
import { compare, inTurn, median, percentile, type Row } from "./report.js";
import type { Run } from "./run.js";

/**
 * A forward pass of 512 tokens takes this long, in P and in D, as on an accelerator of the middle
 * class with a model of 8 billion parameters. No pass is shorter than `leastPassMs`, as the weights
 * are read for each: so the machine's cores do not limit D's steps.
 */
const simulate = { ...SIMULATED, forwardMsPer512Tokens: 40, leastPassMs: 8 };
const CHATS: Traffic = {
  conversations: 8,
  turns: 6,
  sharedTokens: 256,
  firstTokens: 700,
  addedTokens: [40],
  outputTokens: 32,
  pauseMs: 40,
};
const ABOVE_TOKENS = 128;
const ROUNDS = 5;

/**
 * The disaggregation rule on chats of several turns, against two legs for each request: the same
 * engines, in turn.
 */
export async function disaggregation(run: Run): Promise<readonly Row[]> {
  const log = jsonLog("error");
  const options = {
    ...ONE_PAIR,
    transport: "nixl",
    decodes: 2,
    cacheTokens: 65_536,
    instance: { simulate, digests: false },
  } as const;
  await using cluster = await startCluster(options, { log, logLevel: "error" });
  const settings = {
    ...planProxy(cluster.prefills, cluster.decodes, options),
    routing: { prefill: "round-robin", decode: "prefix-aware" } as const,
  };
  const ways = [{ ...settings, disaggregateAbove: ABOVE_TOKENS }, settings];

  const [legs, ttfts, decodes]: [number[], number[]][] = [
    [[], []],
    [[], []],
    [[], []],
  ];
  // The first round warms up.
  for (let round = 0; round <= run.rounds(ROUNDS); round += 1)
    for (const at of inTurn(round)) {
      await using proxy = createProxy({ ...ways[at], log });
      const { url } = await proxy.listen({ port: 0 });
      const turns = await converse(clientOf(url, `chat-${round}-${at}`), CHATS, 10 * round + at);
      if (round === 0) continue;
      const { prefillers } = proxy.status();
      legs?.[at].push(prefillers.reduce((sum, { requests }) => sum + requests, 0));
      const of = (what: (turn: EndedTurn) => number) => turns.map(what);
      ttfts?.[at].push(median(of(({ ttftMs }) => ttftMs)));
      decodes?.[at].push(
        percentile(
          of(({ tokenMs }) => tokenMs),
          0.99,
        ),
      );
    }
  const load = `${CHATS.conversations} conversations of ${CHATS.turns} turns, 956 tokens and 40 more each, 1 P, 2 D`;
  const row = (what: string, series: typeof legs, unit: string, most: number) =>
    compare(what, series ?? [[], []], unit, "<=", most);
  return [
    row(`prefill legs, ${load}: the rule / always two legs`, legs, "", 0.5),
    row("time to the first token, p50", ttfts, "ms", 1),
    row("time per further token, p99 over requests", decodes, "ms", 1.1),
  ];
}
