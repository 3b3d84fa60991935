// D's rank 0 of 2 reads from P's ranks 0 and 1 of 4. The plan says which bytes; the proof, which
// uses nothing of the plan's code, that they are right.
import { buildEngineTransferPlan, planRequest } from "@kv/plan";
import { provePlan } from "@kv/plan/prove";

const numKvHeads = 8;
/** @returns {import("@kv/plan").RankGeometry} */
const rank = (tpRank, tpSize) => {
  const blockBytes = (numKvHeads / tpSize) * 16 * 512; // 16 tokens; K and V of a head and token are 512 bytes
  const sizes = { numBlocks: 1000, blockLengthBytes: blockBytes, blockStrideBytes: blockBytes };
  const regions = ["layers.0", "layers.1"].map((name, layer) => {
    const memoryType = /** @type {const} */ ("VRAM");
    return { name, baseAddress: 2 ** 32 * (layer + 1), ...sizes, groupId: 0, memoryType };
  });
  const engine = {
    kernelBlockSize: 16,
    physicalBlocksPerLogical: 1,
    attentionBackend: "FLASH_ATTN",
  };
  return { tpRank, tpSize, ...engine, layout: "LBHNC", deviceId: tpRank, regions };
};
const remotes = [rank(0, 4), rank(1, 4)];
const plan = buildEngineTransferPlan({ local: rank(0, 2), remotes, numKvHeads, groups: ["full"] });

const { reads } = planRequest(plan, {
  localBlockIds: [[7, 8, 9]],
  remoteBlockIds: [[3, 4, 5]],
  numTokens: 48,
});
for (const { sourceIndex, localIds } of reads)
  console.log(
    `READ from P's rank ${plan.sources[sourceIndex]?.remoteRank}: ${localIds.length} pieces`,
  );

const good = provePlan(plan, { remotes, numKvHeads });
console.log("proven:", good.proven);

// Against a P whose layers lie in another order the same plan is refuted, with the first wrong
// byte.
const { regions, ...others } = rank(1, 4);
const moved = regions.map((each, layer) => ({ ...each, baseAddress: 2 ** 32 * (2 - layer) }));
const bad = provePlan(plan, { remotes: [rank(0, 4), { ...others, regions: moved }], numKvHeads });
console.log(bad.proven ? "proven" : `refuted: ${bad.fault.message}`);
