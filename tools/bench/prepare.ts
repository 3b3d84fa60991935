import { performance } from "node:perf_hooks";
import { planRequest } from "@kv/plan";
import { openPair } from "./nixl/fixture.js";
import { pythonNixl, vllmNixl } from "./python-peer.js";
import { BLOCK_SIZE, ORDERS, planOf, ranksOf } from "./ranks.js";
import { compare, type Row, spread } from "./report.js";
import type { Run } from "./run.js";

const REGIONS = 64;
/** Small blocks, so that copying adds little noise. */
const BLOCK_LENGTH_BYTES = 512;
const KV_HEADS = 8;
const TOKENS = [2048, 32_768];
const ROUNDS = 41;
/** Requests that are planned before the measurement, so that V8 has compiled the code. */
const SERVED = 2000;
const WARM_MS = 1500;
const notification = new TextEncoder().encode("request:1");

/** Block ids of a request: one run, or every other block, so that nothing merges. */
const idsOf = (count: number, order: (typeof ORDERS)[number], from: number) =>
  Array.from({ length: count }, (_, i) => from + (order === "one run" ? i : 2 * i));

/**
 * From block ids to requests that are ready to post: our planRequest, the hand-over to the agent's
 * thread and the preparation of each slice's request, against vLLM 0.33's `_read_blocks` up to the
 * end of make_prepped_xfer (vLLM's own functions where it is set up, else only the numpy
 * arithmetic). Neither side includes posts, which are the copy on one host, or the work of our
 * thread for other requests between two posts. Both sides decode the ids from JSON just before.
 */
export async function prepare(run: Run): Promise<readonly Row[]> {
  const vllm = await vllmNixl();
  const python = vllm ?? (await pythonNixl());
  const reference = vllm === undefined ? "vLLM's arithmetic alone" : "vLLM's";
  const numBlocks = 2 * (Math.max(...TOKENS) / BLOCK_SIZE) + 8;
  const length = REGIONS * numBlocks * BLOCK_LENGTH_BYTES;
  const { agent, memory, target, close } = await openPair(length);
  const rows: Row[] = [];
  try {
    const { metadata, address } = target;
    await python.ask({ do: "open", metadata, address, length });
    const rankAt = (baseAddress: number) =>
      ranksOf({
        numKvHeads: KV_HEADS,
        regions: REGIONS,
        numBlocks,
        blockLengthBytes: BLOCK_LENGTH_BYTES,
        baseAddress,
        memoryType: "DRAM",
      })[0];
    const plan = planOf(rankAt(memory.address), [rankAt(address)], KV_HEADS);
    const source = plan.sources[0];
    if (source === undefined) throw new Error("the plan has no source");
    const local = await agent.prepareLocal(source.localTable);
    const remote = await agent.prepareRemote(target.name, source.remoteTable);

    for (const tokens of TOKENS)
      for (const order of ORDERS) {
        const count = tokens / BLOCK_SIZE;
        const [localIds, remoteIds] = [idsOf(count, order, 1), idsOf(count, order, 3)];
        const line = JSON.stringify({ localIds, remoteIds });
        const planOnce = () => {
          const blocks = JSON.parse(line) as { localIds: number[]; remoteIds: number[] };
          const begun = performance.now();
          const [read] = planRequest(plan, {
            localBlockIds: [blocks.localIds],
            remoteBlockIds: [blocks.remoteIds],
            numTokens: tokens,
          }).reads;
          if (read === undefined) throw new Error("nothing to read");
          return { begun, read };
        };
        const once = async () => {
          const { begun, read } = planOnce();
          const planMs = performance.now() - begun;
          const request = { operation: "READ", local, remote, notification } as const;
          const { done } = agent.transfer({ ...request, ...read.descriptors });
          const { prepareMs = Number.NaN, mergedCount = Number.NaN, transferMs } = await done;
          return {
            planMs,
            // With the time from the end of the copy to the promise, which no clock of ours tells
            // apart.
            untilPostMs: performance.now() - begun - transferMs,
            preparedMs: planMs + prepareMs,
            merged: mergedCount / read.descriptorCount,
          };
        };
        for (let i = 0; i < SERVED; i += 1) planOnce();
        for (const until = performance.now() + WARM_MS; performance.now() < until; ) await once();

        const ours: Awaited<ReturnType<typeof once>>[] = [];
        const theirs: number[] = [];
        const shape = { regions: REGIONS, blocks: numBlocks, block: BLOCK_LENGTH_BYTES };
        for (let i = 0; i < run.rounds(ROUNDS); i += 1) {
          python.pause();
          ours.push(await once());
          python.resume();
          const request = { do: "prepare", ...shape, localIds, remoteIds, times: 1 };
          const { ms } = await python.ask<{ ms: number[] }>(request);
          theirs.push(ms[0] ?? Number.NaN);
        }
        const of = (what: keyof (typeof ours)[number]) => ours.map((one) => one[what]);
        const where = `${tokens} tokens x ${REGIONS} regions, ${order}`;
        const prepared = `block ids to prepared requests, ${where}: time / ${reference}`;
        const posted = `block ids to the first post, ${where}: time / ${reference}, which posts once`;
        const row = compare(prepared, [of("preparedMs"), theirs], "ms", "<=", 1);
        const merged = of("merged").at(-1) ?? Number.NaN;
        const allowed = order === "one run" ? 0.5 : 1;
        rows.push(
          { ...row, ours: `${row.ours}; the plan ${spread(of("planMs"), "ms")}` },
          compare(posted, [of("untilPostMs"), theirs], "ms", "<=", 0.9),
          {
            what: `descriptors handed to NIXL, ${where} / vLLM's`,
            ours: "-",
            ratio: merged,
            theirs: "one per block and region",
            wanted: `<= ${allowed}`,
            met: merged <= allowed,
          },
        );
      }
  } finally {
    await python.close();
    await close();
  }
  return rows;
}
