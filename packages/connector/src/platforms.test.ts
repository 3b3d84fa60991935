import { platformSuite } from "@kv/conformance/platform";
import { expect, test } from "vitest";
import { cpuPlatform, cudaPlatform } from "./platforms.js";

platformSuite({ name: "cpu", create: cpuPlatform });
platformSuite({ name: "cuda", create: () => cudaPlatform({ gpus: ["nvidia0"] }) });

test("cuda is refused without a GPU, with a hint to use the cpu platform and the devices that there are", () => {
  expect(() => cudaPlatform({ gpus: [] })).toThrowError(
    expect.objectContaining({
      code: "KV_PLATFORM_UNSUPPORTED",
      message: expect.stringMatching(/\/dev\/nvidia0\. This machine has \d+ CPU cores and /),
      hint: expect.stringContaining('"cpu"'),
    }),
  );
});

test("registers host memory without staging, and packs K and V in the last dimension", () => {
  const platform = cpuPlatform();
  expect(platform.deviceType).toBe("cpu");
  expect(platform.capabilities).toMatchObject({ registersAs: ["DRAM"], bufferDevices: ["cpu"] });
  expect(platform.createStaging).toBeUndefined();
  expect(
    platform.kvCacheShape({ numBlocks: 10, blockSize: 16, numKvHeads: 4, headSize: 32 }),
  ).toEqual([10, 4, 16, 64]);
  expect(platform.check({ prefixCaching: true, maxNumSeqs: 256, unknown: 1 })).toEqual([]);
});

test("maxModelLen is max_model_len, else max_position_embeddings, and an invalid value is an error", () => {
  const { maxModelLen } = cpuPlatform();
  expect(maxModelLen({ max_position_embeddings: 4096 })).toBe(4096);
  expect(maxModelLen({ max_model_len: 512, max_position_embeddings: 4096 })).toBe(512);
  for (const value of [undefined, 0, 1.5, "4096"]) {
    expect(() => maxModelLen({ max_position_embeddings: value })).toThrow(
      expect.objectContaining({ code: "KV_CONFIG_INVALID" }),
    );
  }
});
