import { performance } from "node:perf_hooks";
import { planRequest } from "@kv/plan";
import { computeTpMapping } from "@kv/topology";
import type { LinePeer } from "../clients/python.js";
import { vllmPlans } from "./python-peer.js";
import { BLOCK_SIZE, idsOf, ORDERS, planOf, ranksOf } from "./ranks.js";
import { alone, pairRatio, type Row, rowOf, spread } from "./report.js";
import type { Run } from "./run.js";

const REGIONS = 64;
const KV_HEADS = 8;
const TOKENS = [2048, 8192, 32_768, 131_072];
const TP_SIZES = [1, 2, 4, 8];
const ROUNDS = 31;
/** So that V8 has compiled the code. */
const WARM_MS = 1_000;

async function against(
  peer: LinePeer | undefined,
  rounds: number,
  what: string,
  ours: () => unknown,
  command: object,
  wanted: number,
): Promise<Row> {
  const once = () => {
    const begun = performance.now();
    ours();
    return performance.now() - begun;
  };
  for (const until = performance.now() + WARM_MS; performance.now() < until; ) ours();
  const [mine, theirs]: [number[], number[]] = [[], []];
  for (let round = 0; round < rounds; round++) {
    mine.push(Math.min(once(), once(), once()));
    const answer = await peer?.ask<{ ms: number[] }>({ ...command, times: 3 });
    if (answer !== undefined) theirs.push(Math.min(...answer.ms));
  }
  const label = `${what}: vLLM's time / ours`;
  const shown = spread(mine, "ms");
  if (peer === undefined)
    return alone(label, shown, `>= ${wanted}`, undefined, "not set up: npm run test:vllm", rounds);
  const ratio = pairRatio(theirs, mine);
  return { ...rowOf(label, [shown, spread(theirs, "ms")], ratio, ">=", wanted), rounds };
}

/** Against vLLM's functions. */
export async function plan(run: Run) {
  const peer = vllmPlans();
  const rounds = run.rounds(ROUNDS);
  const rows: Row[] = [];
  try {
    for (const tokens of run.short ? TOKENS.slice(0, 1) : TOKENS) {
      const count = tokens / BLOCK_SIZE;
      const numBlocks = 2 * count + 16;
      const [rank] = ranksOf({ numKvHeads: KV_HEADS, regions: REGIONS, numBlocks });
      const made = planOf(rank, [rank], KV_HEADS);
      for (const order of ORDERS) {
        const [localIds, remoteIds] = [idsOf(count, order, 1), idsOf(count, order, 3)];
        const blocks = {
          localBlockIds: [localIds],
          remoteBlockIds: [remoteIds],
          numTokens: tokens,
        };
        const what = `request to what NIXL is asked for, both sides, ${tokens} tokens x ${REGIONS} regions, ${order}`;
        const ours = () => planRequest(made, blocks).reads.map(({ descriptors }) => descriptors);
        const command = { do: "prepare", regions: REGIONS, blocks: numBlocks, localIds, remoteIds };
        rows.push(await against(peer, rounds, what, ours, command, order === "one run" ? 5 : 1));
      }
    }

    const inputs = TP_SIZES.flatMap((tpSize) =>
      TP_SIZES.flatMap((remoteTpSize) =>
        TP_SIZES.flatMap((numKvHeads) =>
          Array.from({ length: tpSize }, (_, tpRank) => ({
            tpRank,
            tpSize,
            remoteTpSize,
            numKvHeads,
            isMla: false,
            groups: ["full" as const],
          })),
        ),
      ),
    );
    const mapAll = () => inputs.map((input) => computeTpMapping(input));
    const cases = inputs.map((one) => [one.tpRank, one.tpSize, one.remoteTpSize, one.numKvHeads]);
    const what = `TP mapping, a grid of ${inputs.length} calls`;
    rows.push(await against(peer, rounds, what, mapAll, { do: "mapping", cases }, 10));
    return rows;
  } finally {
    await peer?.close();
  }
}
