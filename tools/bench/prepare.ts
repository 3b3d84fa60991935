import { performance } from "node:perf_hooks";
import type { RankGeometry } from "@kv/plan";
import { buildEngineTransferPlan, planRequest } from "@kv/plan";
import { openPair } from "./nixl/fixture.js";
import { pythonNixl, vllmNixl } from "./python-peer.js";
import { BLOCK_SIZE, ranksOf } from "./ranks.js";
import { compare, type Row, spread } from "./report.js";

const REGIONS = 64;
const BLOCK_LENGTH_BYTES = 512;
const ROUNDS = 41;
/** Requests that are planned before the measurement, so that V8 has compiled the code. */
const SERVED = 2000;
const notification = new TextEncoder().encode("request:1");

/** A rank with small blocks, so that copying adds little noise. */
function geometry(base: number, numBlocks: number): RankGeometry {
  const [rank] = ranksOf({ numKvHeads: 8, regions: REGIONS, numBlocks });
  if (rank === undefined) throw new Error("no rank");
  const length = { blockLengthBytes: BLOCK_LENGTH_BYTES, blockStrideBytes: BLOCK_LENGTH_BYTES };
  const regions = rank.regions.map((region, at) => {
    const baseAddress = base + at * numBlocks * BLOCK_LENGTH_BYTES;
    return { ...region, ...length, baseAddress, memoryType: "DRAM" as const };
  });
  return { ...rank, regions };
}

/** Block ids of a request: one run, or every other block, so that nothing merges. */
const idsOf = (count: number, order: "one run" | "scattered", from: number) =>
  Array.from({ length: count }, (_, i) => from + (order === "one run" ? i : 2 * i));

/**
 * From block ids to requests that are ready to post: our planRequest, the hand-over to the agent's
 * thread and the preparation of each slice's request, against vLLM 0.33's `_read_blocks` up to the
 * end of make_prepped_xfer (vLLM's own functions where it is set up, else only the numpy
 * arithmetic). Neither side includes posts, which are the copy on one host, or the work of our
 * thread for other requests between two posts. Both sides decode the ids from JSON just before.
 */
export async function prepare(): Promise<readonly Row[]> {
  const vllm = await vllmNixl();
  const python = vllm ?? (await pythonNixl());
  const reference = vllm === undefined ? "vLLM's arithmetic alone" : "vLLM's";
  const most = 2 * (32_768 / BLOCK_SIZE) + 8;
  const length = REGIONS * most * BLOCK_LENGTH_BYTES;
  const { agent, memory, target, close } = await openPair(length);
  const rows: Row[] = [];
  try {
    const { metadata, address } = target;
    await python.ask({ do: "open", metadata, address, length });
    const plan = buildEngineTransferPlan({
      local: geometry(memory.address, most),
      remotes: [geometry(address, most)],
      numKvHeads: 8,
      groups: ["full"],
    });
    const source = plan.sources[0];
    if (source === undefined) throw new Error("the plan has no source");
    const local = await agent.prepareLocal(source.localTable);
    const remote = await agent.prepareRemote(target.name, source.remoteTable);
    for (const tokens of [2048, 32_768]) {
      const count = tokens / BLOCK_SIZE;
      for (const order of ["one run", "scattered"] as const) {
        const localIds = idsOf(count, order, 1);
        const remoteIds = idsOf(count, order, 3);
        const ours: number[] = [];
        const theirs: number[] = [];
        const line = JSON.stringify({ localIds, remoteIds });
        const planOnce = () => {
          const blocks = JSON.parse(line) as { localIds: number[]; remoteIds: number[] };
          const begun = performance.now();
          const { reads } = planRequest(plan, {
            localBlockIds: [blocks.localIds],
            remoteBlockIds: [blocks.remoteIds],
            numTokens: tokens,
          });
          const [read] = reads;
          if (read === undefined) throw new Error("nothing to read");
          return { begun, read, descriptors: read.descriptors };
        };
        const once = async () => {
          const { begun, read, descriptors } = planOnce();
          const ended = performance.now();
          const transfer = agent.transfer({
            operation: "READ",
            local,
            remote,
            notification,
            ...descriptors,
          });
          const {
            prepareMs = Number.NaN,
            mergedCount = Number.NaN,
            transferMs = Number.NaN,
          } = await transfer.done;
          return {
            planMs: ended - begun,
            // With the time from the end of the copy to the promise, which no clock of ours tells
            // apart.
            untilPostMs: performance.now() - begun - transferMs,
            besidePostMs: ended - begun + prepareMs,
            merged: mergedCount / read.descriptorCount,
          };
        };
        const plans: number[] = [];
        const untilPost: number[] = [];
        let merged = Number.NaN;
        for (let i = 0; i < SERVED; i += 1) planOnce();
        for (const until = performance.now() + 1500; performance.now() < until; ) await once();
        for (let i = 0; i < ROUNDS; i += 1) {
          python.pause();
          const mine = await once();
          python.resume();
          ours.push(mine.besidePostMs);
          plans.push(mine.planMs);
          untilPost.push(mine.untilPostMs);
          merged = mine.merged;
          const shape = { regions: REGIONS, blocks: most, block: BLOCK_LENGTH_BYTES };
          const request = { do: "prepare", ...shape, localIds, remoteIds, times: 1 };
          const answer = await python.ask<{ ms: number[] }>(request);
          theirs.push(answer.ms[0] ?? Number.NaN);
        }
        const where = `${tokens} tokens x ${REGIONS} regions, ${order}`;
        const prepared = `block ids to prepared requests, ${where}: time / ${reference}`;
        const posted = `block ids to the first post, ${where}: time / ${reference}, which posts once`;
        const row = compare(prepared, [ours, theirs], "ms", "<=", 1);
        rows.push({ ...row, ours: `${row.ours}; the plan ${spread(plans, "ms")}` });
        rows.push(compare(posted, [untilPost, theirs], "ms", "<=", 0.9));
        const allowed = order === "one run" ? 0.5 : 1;
        rows.push({
          what: `descriptors handed to NIXL, ${where} / vLLM's`,
          ours: "-",
          ratio: merged,
          theirs: "one per block and region",
          wanted: `<= ${allowed}`,
          met: merged <= allowed,
        });
      }
    }
  } finally {
    await python.close();
    await close();
  }
  return rows;
}
