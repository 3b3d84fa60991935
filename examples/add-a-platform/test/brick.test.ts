import type { KvCacheConfig, KvCacheRegion } from "@kv/interface";
import { memoryTransport } from "@kv/transport-memory";
import { expect, test } from "vitest";
import { brickPlatform } from "../src/platform.js";

test("more than one sequence gives a warning with the setting", () => {
  const warnings = brickPlatform().check({ maxNumSeqs: 4 });
  expect(warnings.map(({ setting }) => setting)).toEqual(["maxNumSeqs"]);
  expect(brickPlatform().check({ maxNumSeqs: 1 })).toEqual([]);
});

test("a block id out of range is an error with a code", async () => {
  const transport = memoryTransport();
  const memory = transport.allocate(4096);
  const region: KvCacheRegion = {
    name: "layers.0",
    memory,
    memoryType: memory.memoryType,
    groupId: 0,
    offsetBytes: 0,
    numBlocks: 64,
    blockLengthBytes: 64,
    blockStrideBytes: 64,
  };
  const config = {
    groups: [{ kind: "full", layerNames: ["layers.0"] }],
  } as unknown as KvCacheConfig;
  const { createStaging } = brickPlatform();
  const staging = await createStaging?.({
    transport,
    config,
    caches: { config, regions: [region] },
    poolBlocks: 4,
  });
  await expect(staging?.load("r", { device: [[64]], wire: [[1]] })).rejects.toMatchObject({
    code: "KV_STAGING_FAILED",
  });
  await expect(staging?.save("r", { device: [[1]], wire: [[4]] })).rejects.toMatchObject({
    code: "KV_STAGING_FAILED",
  });
  await staging?.close();
  memory.close();
  await transport.close();
});
