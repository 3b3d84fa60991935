import { expect, test } from "vitest";
import { applyReceivePass, buildEngineTransferPlan, planRequest } from "./index.js";
import { samplePair, sampleRank } from "./sample-pair.test-support.js";

test("views that do not hold the region are refused before a byte is touched", () => {
  const plan = buildEngineTransferPlan(samplePair());
  const { receivePass } = planRequest(plan, { localBlockIds: [[1]], remoteBlockIds: [[1]], numTokens: 3 });
  if (receivePass === undefined) throw new Error("a pass was expected");
  const whole = new Uint8Array(10 * 512).fill(1);
  expect(() => applyReceivePass(plan, receivePass, [whole.subarray(1), whole])).toThrow(
    /5119 bytes .* need 5120/,
  );
  expect(() => applyReceivePass(plan, receivePass, [])).toThrow(/region 0 .* no view/);
  expect(whole.every((byte) => byte === 1)).toBe(true);
});

test("the padding between blocks is not touched", () => {
  const rank = sampleRank();
  const regions = rank.regions.map((region) => ({ ...region, blockStrideBytes: 600 }));
  const plan = buildEngineTransferPlan(samplePair({ ...rank, regions }, rank));
  const { receivePass } = planRequest(plan, { localBlockIds: [[1]], remoteBlockIds: [[1]], numTokens: 8 });
  const views = [0, 1].map(() => new Uint8Array(6000).fill(1));
  if (receivePass !== undefined) applyReceivePass(plan, receivePass, views);
  const zeros = [...(views[0] ?? [])].flatMap((byte, at) => (byte === 0 ? [at] : []));
  // Four heads of 128 bytes in block 1; the later half of each is zeroed.
  const expected = [0, 1, 2, 3].flatMap((head) =>
    Array.from({ length: 64 }, (_, at) => 600 + head * 128 + 64 + at),
  );
  expect(zeros).toEqual(expected);
});
