import { expect, test } from "vitest";
import { buildEngineTransferPlan } from "./engine-plan.js";
import { mergedDescriptorCount } from "./merged-descriptors.js";
import { planRequest } from "./request-plan.js";
import { samplePair, sampleRank } from "./sample-pair.test-support.js";

const blocks = { localBlockIds: [[3, 4, 5, 8]], remoteBlockIds: [[1, 2, 3, 7]] };

function counts(pair: ReturnType<typeof samplePair>) {
  const plan = buildEngineTransferPlan(pair);
  const request = planRequest(plan, blocks);
  return [request.descriptorCount, request.runCount, mergedDescriptorCount(plan, request)];
}

test("whole blocks without padding merge run by run", () => {
  expect(counts(samplePair())).toEqual([8, 4, 4]);
});

test("a share of each block, and blocks with padding, do not merge though their ids follow one another", () => {
  const share = samplePair(sampleRank({ tpSize: 2 }), sampleRank());
  expect(counts(share)).toEqual([8, 4, 8]);
  const rank = sampleRank();
  const regions = rank.regions.map((region) => ({
    ...region,
    blockStrideBytes: region.blockLengthBytes + 64,
  }));
  expect(counts(samplePair(rank, { ...rank, regions }))).toEqual([8, 4, 8]);
});

test("regions that adjoin on both sides merge at their edge", () => {
  const rank = sampleRank();
  const [first] = rank.regions;
  const bytes = 10 * (first?.blockLengthBytes ?? 0);
  const regions = rank.regions.map((region, index) => ({ ...region, baseAddress: 4096 + index * bytes }));
  const plan = buildEngineTransferPlan(samplePair({ ...rank, regions }, { ...rank, regions }));
  const request = planRequest(plan, { localBlockIds: [[0, 9]], remoteBlockIds: [[0, 9]] });
  expect([request.runCount, mergedDescriptorCount(plan, request)]).toEqual([4, 3]);
});
