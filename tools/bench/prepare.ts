import { performance } from "node:perf_hooks";
import { planRequest } from "@kv/plan";
import { openPair, series, withoutPython } from "./nixl/fixture.js";
import { pythonNixl, vllmNixl } from "./python-peer.js";
import { BLOCK_SIZE, idsOf, ORDERS, planOf, ranksOf } from "./ranks.js";
import { compare, type Row, rowOf, spread } from "./report.js";
import type { Run } from "./run.js";

const REGIONS = 64;
/** Small blocks, so that copying adds little noise. */
const BLOCK_LENGTH_BYTES = 512;
const KV_HEADS = 8;
const TOKENS = [2048, 32_768];
const ROUNDS = 41;
/** So that V8 has compiled the code. */
const SERVED = 2000;
const WARM_MS = 1500;
const notification = new TextEncoder().encode("request:1");

/**
 * From block ids to requests that are ready to post: planRequest, the hand-over to the agent's
 * thread and the preparation of each slice's request, against vLLM 0.33's `_read_blocks` up to the
 * end of make_prepped_xfer (where vLLM is not set up, only the numpy arithmetic). Neither side
 * includes posts, which are the copy on one host.
 */
export async function prepare(run: Run) {
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
            // With the time from the end of the copy to the promise.
            untilPostMs: performance.now() - begun - transferMs,
            preparedMs: planMs + prepareMs,
            merged: mergedCount / read.descriptorCount,
          };
        };
        for (let i = 0; i < SERVED; i += 1) planOnce();
        for (const until = performance.now() + WARM_MS; performance.now() < until; ) await once();

        const shape = { regions: REGIONS, blocks: numBlocks, block: BLOCK_LENGTH_BYTES };
        const request = { do: "prepare", ...shape, localIds, remoteIds, times: 1 };
        const measured = await series(run.rounds(ROUNDS), async () => {
          const ours = await withoutPython(python, once);
          const { ms } = await python.ask<{ ms: number[] }>(request);
          return { ...ours, theirs: ms[0] ?? Number.NaN };
        });
        const { planMs, untilPostMs, preparedMs, merged, theirs } = measured;
        const where = `${tokens} tokens x ${REGIONS} regions, ${order}`;
        const prepared = `block ids to prepared requests, ${where}: time / ${reference}`;
        const posted = `block ids to the first post, ${where}: time / ${reference}, which posts once`;
        const handed = `descriptors handed to NIXL, ${where} / vLLM's`;
        const row = compare(prepared, [preparedMs, theirs], "ms", "<=", 1);
        const allowed = order === "one run" ? 0.5 : 1;
        const lastMerged = merged.at(-1) ?? Number.NaN;
        rows.push(
          { ...row, ours: `${row.ours}; the plan ${spread(planMs, "ms")}` },
          compare(posted, [untilPostMs, theirs], "ms", "<=", 0.9),
          rowOf(handed, ["-", "one per block and region"], lastMerged, "<=", allowed),
        );
      }
  } finally {
    await python.close();
    await close();
  }
  return rows;
}
