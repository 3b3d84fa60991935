import { expect, test } from "vitest";
import { cpuPlatform } from "./cpu-platform.js";

test("host memory is registered as it is, and K and V are packed in the last dimension", () => {
  const platform = cpuPlatform();
  expect(platform.deviceType).toBe("cpu");
  expect(platform.capabilities).toMatchObject({ registersAs: ["DRAM"], bufferDevices: ["cpu"] });
  expect(platform.createStaging).toBeUndefined();
  expect(platform.kvCacheShape({ numBlocks: 10, blockSize: 16, numKvHeads: 4, headSize: 32 })).toEqual([
    10, 4, 16, 64,
  ]);
  expect(platform.check({ prefixCaching: true, maxNumSeqs: 256, unknown: 1 })).toEqual([]);
});

test("the longest sequence is the model's, or an error that names what was found", () => {
  const { maxModelLen } = cpuPlatform();
  expect(maxModelLen({ max_position_embeddings: 4096 })).toBe(4096);
  for (const value of [undefined, 0, 1.5, "4096"]) {
    expect(() => maxModelLen({ max_position_embeddings: value })).toThrow(
      expect.objectContaining({ code: "KV_CONFIG_INVALID" }),
    );
  }
});
