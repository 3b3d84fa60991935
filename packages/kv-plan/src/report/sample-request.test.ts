import { expect, test } from "vitest";
import { sampleRank } from "../../../plan/src/sample-pair.test-support.js";
import { sampleRequest } from "./sample-request.js";

test("a prefix hit supplies the same tokens of each group, in blocks of the group's size (vllm#30419)", () => {
  const rank = { ...sampleRank(), groupBlockTokens: [16, 64, 8] };
  const regions = rank.regions.map((region) => ({ ...region, numBlocks: 100 }));
  const engine = [{ ...rank, regions }];
  const pair = {
    title: "",
    numKvHeads: 4,
    assumed: [],
    windowTokens: [undefined, undefined, 32],
    groups: ["full", "full", "swa"],
    prefill: engine,
    decode: engine,
  };
  const request = sampleRequest(pair, { numTokens: 150, computedBlocks: 5, pool: "consecutive" });
  expect(request?.localComputedBlocks).toEqual([5, 1, 0]);
  expect(request?.localBlockIds.map((ids) => ids.length)).toEqual([5, 2, 5]);
  expect(request?.remoteBlockIds.map((ids) => ids.length)).toEqual([10, 3, 5]);
});
