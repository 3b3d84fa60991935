import { performance } from "node:perf_hooks";
import { nixlTransport } from "@kv/nixl";
import type { RankGeometry } from "@kv/plan";
import { buildEngineTransferPlan, planRequest } from "@kv/plan";
import { nodeTarget, pythonNixl } from "./python-peer.js";
import type { Row } from "./report.js";
import { bestRatio, pairRatio, spread } from "./report.js";

const REGIONS = 64;
const BLOCK_SIZE = 16;
const BLOCK_LENGTH_BYTES = 512;
const ROUNDS = 41;

function geometry(base: number, numBlocks: number): RankGeometry {
  return {
    tpRank: 0,
    tpSize: 1,
    kernelBlockSize: BLOCK_SIZE,
    physicalBlocksPerLogical: 1,
    layout: "LBHNC",
    attentionBackend: "PLAIN",
    deviceId: 0,
    regions: Array.from({ length: REGIONS }, (_, region) => ({
      name: `layers.${region}`,
      baseAddress: base + region * numBlocks * BLOCK_LENGTH_BYTES,
      numBlocks,
      blockLengthBytes: BLOCK_LENGTH_BYTES,
      blockStrideBytes: BLOCK_LENGTH_BYTES,
      groupId: 0,
      memoryType: "DRAM",
    })),
  };
}

/** Block ids of a request: one run, or every other block, so that nothing merges. */
const idsOf = (count: number, order: "one run" | "scattered", from: number) =>
  Array.from({ length: count }, (_, i) => from + (order === "one run" ? i : 2 * i));

/**
 * From block ids to the last post, without the time inside NIXL's posts (on one host a post is the copy): our planRequest, the hand-over to the
 * agent's thread, the making of each slice's request, against vLLM's numpy arithmetic and make_prepped_xfer in Python. Blocks are small, so
 * that copying does not blur it.
 */
export async function prepare(): Promise<readonly Row[]> {
  const target = nodeTarget();
  const python = await pythonNixl();
  const transport = nixlTransport();
  const rows: Row[] = [];
  try {
    const most = 2 * (32_768 / BLOCK_SIZE) + 8;
    const lengthBytes = REGIONS * most * BLOCK_LENGTH_BYTES;
    const { metadata, address } = await target.ask<{ metadata: string; address: number }>({ lengthBytes });
    await python.ask({ do: "open", metadata, address, length: lengthBytes });
    const agent = await transport.createAgent();
    const memory = transport.allocate(lengthBytes);
    await agent.register(memory);
    const remoteName = await agent.addRemote(Buffer.from(metadata, "hex"));
    const plan = buildEngineTransferPlan({
      local: geometry(memory.address, most),
      remotes: [geometry(address, most)],
      numKvHeads: 8,
      groups: ["full"],
    });
    const source = plan.sources[0];
    if (source === undefined) throw new Error("the plan has no source");
    const local = await agent.prepareLocal(source.localTable);
    const remote = await agent.prepareRemote(remoteName, source.remoteTable);
    for (const tokens of [2048, 32_768]) {
      const count = tokens / BLOCK_SIZE;
      for (const order of ["one run", "scattered"] as const) {
        const localIds = idsOf(count, order, 1);
        const remoteIds = idsOf(count, order, 3);
        const ours: number[] = [];
        const theirs: number[] = [];
        const once = async () => {
          const begun = performance.now();
          const request = planRequest(plan, {
            localBlockIds: [localIds],
            remoteBlockIds: [remoteIds],
            numTokens: tokens,
          });
          const [read] = request.reads;
          if (read === undefined) throw new Error("nothing to read");
          const { descriptors } = read;
          const planned = performance.now();
          const transfer = agent.transfer({ operation: "READ", local, remote, ...descriptors });
          const { prepareMs = Number.NaN, mergedCount = Number.NaN } = await transfer.done;
          return {
            planMs: planned - begun,
            besidePostMs: planned - begun + prepareMs,
            merged: mergedCount / read.descriptorCount,
          };
        };
        const plans: number[] = [];
        let merged = Number.NaN;
        for (const until = performance.now() + 1500; performance.now() < until; ) await once();
        for (let i = 0; i < ROUNDS; i += 1) {
          const mine = await once();
          ours.push(mine.besidePostMs);
          plans.push(mine.planMs);
          merged = mine.merged;
          const answer = await python.ask<{ ms: number[] }>({
            do: "prepare",
            regions: REGIONS,
            blocks: most,
            block: BLOCK_LENGTH_BYTES,
            localIds,
            remoteIds,
            times: 1,
          });
          theirs.push(answer.ms[0] ?? Number.NaN);
        }
        const ratio = pairRatio(ours, theirs);
        rows.push({
          what: `ids to posted, ${tokens} tokens x ${REGIONS} regions, ${order} (plan ${spread(plans, "ms")}): time / vLLM's`,
          ours: spread(ours, "ms"),
          theirs: spread(theirs, "ms"),
          ratio,
          best: bestRatio(ours, theirs, "least"),
          wanted: "<= 1",
          met: ratio <= 1,
        });
        const allowed = order === "one run" ? 0.5 : 1;
        rows.push({
          what: `descriptors handed to NIXL, ${tokens} tokens x ${REGIONS} regions, ${order} / vLLM's`,
          ours: "-",
          theirs: "one for each block and region",
          ratio: merged,
          wanted: `<= ${allowed}`,
          met: merged <= allowed,
        });
      }
    }
  } finally {
    await transport.close();
    await python.close();
    await target.close();
  }
  return rows;
}
