import { performance } from "node:perf_hooks";
import { fileURLToPath } from "node:url";
import { buildEngineTransferPlan, type EngineTransferPlan, planRequest } from "@kv/plan";
import { type LinePeer, linePeer } from "../clients/python.js";
import { mapping } from "./mapping.js";
import { vllmPython } from "./python-peer.js";
import { BLOCK_SIZE, idsOf, ORDERS, ranksOf } from "./ranks.js";
import { alone, pairRatio, type Row, rowOf, spread } from "./report.js";

const REGIONS = 64;
const KV_HEADS = 8;
const TOKENS = [2048, 8192, 32_768, 131_072];
const ROUNDS = 31;
/** Time of calls before the measurement, so that V8 has compiled the code. */
const WARM_MS = 1_000;

function planOf(numBlocks: number): EngineTransferPlan {
  const [rank] = ranksOf({ numKvHeads: KV_HEADS, regions: REGIONS, numBlocks });
  if (rank === undefined) throw new Error("no rank");
  const pair = { local: rank, remotes: [rank], numKvHeads: KV_HEADS, groups: ["full" as const] };
  const plan = buildEngineTransferPlan(pair);
  // Tables are built at first use, which is in the handshake.
  for (const source of plan.sources)
    void (source.localTable.rows.length + source.remoteTable.rows.length);
  return plan;
}

function timed(work: () => unknown): number {
  const begun = performance.now();
  work();
  return performance.now() - begun;
}

/** Measures `ours` and vLLM's work for `command` in turn. */
async function against(
  peer: LinePeer | undefined,
  what: string,
  ours: () => unknown,
  command: object,
  wanted: number,
): Promise<Row> {
  for (const until = performance.now() + WARM_MS; performance.now() < until; ) ours();
  const [mine, theirs]: [number[], number[]] = [[], []];
  for (let round = 0; round < ROUNDS; round++) {
    mine.push(Math.min(timed(ours), timed(ours), timed(ours)));
    const answer = await peer?.ask<{ ms: number[] }>({ ...command, times: 3 });
    if (answer !== undefined) theirs.push(Math.min(...answer.ms));
  }
  const vllm = peer === undefined ? "not set up: npm run test:vllm" : spread(theirs, "ms");
  const label = `${what}: vLLM's time / ours`;
  if (peer === undefined)
    return alone(label, spread(mine, "ms"), `>= ${wanted}`, undefined, vllm, ROUNDS);
  const row = rowOf(label, [spread(mine, "ms"), vllm], pairRatio(theirs, mine), ">=", wanted);
  return { ...row, rounds: ROUNDS };
}

/** The time from a request to the descriptors for the transport, against vLLM. */
async function requests(peer: LinePeer | undefined): Promise<Row[]> {
  const rows: Row[] = [];
  for (const tokens of TOKENS) {
    const count = tokens / BLOCK_SIZE;
    const numBlocks = 2 * count + 16;
    const plan = planOf(numBlocks);
    const where = `${tokens} tokens x ${REGIONS} regions`;
    for (const order of ORDERS) {
      const [localIds, remoteIds] = [idsOf(count, order, 1), idsOf(count, order, 3)];
      rows.push(
        await against(
          peer,
          `request to what NIXL is asked for, both sides, ${where}, ${order}`,
          () =>
            planRequest(plan, {
              localBlockIds: [localIds],
              remoteBlockIds: [remoteIds],
              numTokens: tokens,
            }).reads.map(({ descriptors }) => descriptors),
          { do: "prepare", regions: REGIONS, blocks: numBlocks, localIds, remoteIds },
          order === "one run" ? 5 : 1,
        ),
      );
    }
  }
  return rows;
}

export async function plan(): Promise<readonly Row[]> {
  const vllm = vllmPython();
  const script = fileURLToPath(new URL("./python/plan.py", import.meta.url));
  const peer = vllm === undefined ? undefined : linePeer(vllm.python, [script], vllm.env);
  try {
    return [...(await requests(peer)), ...(await mapping())];
  } finally {
    await peer?.close();
  }
}
