import type { KvCacheConfig, KvCacheRegion, KvCaches } from "@kv/interface";
import { memoryTransport } from "@kv/transport-memory";
import { describe, expect, test } from "vitest";
import { CONFIG } from "../../test/config.js";
import { simulatedDevice } from "../device/simulated-device.js";
import { deviceLayers, neuronCaches } from "./neuron-caches.js";
import { createNeuronStaging } from "./staging.js";

const config: KvCacheConfig = {
  ...CONFIG,
  groups: [
    { kind: "full", layerNames: ["layers.0"] },
    { kind: "swa", slidingWindowTokens: 40, layerNames: ["layers.1"], blockSize: 64 },
  ],
};

/** K of one head and token: 8 elements of bfloat16. */
const ROW_BYTES = 16;
const open = () => neuronCaches({ device: simulatedDevice(), config, numBlocks: 4, numHeads: 2 });

describe("groups of 16 and 64 tokens per block (vllm-gaudi#1373)", () => {
  test("each plane has blocks of its group's tokens, and planes do not overlap", () => {
    const { regions } = open();
    expect(
      regions.map(({ name, groupId, blockLengthBytes, offsetBytes }) => [
        name,
        groupId,
        blockLengthBytes / (2 * ROW_BYTES),
        offsetBytes,
      ]),
    ).toEqual([
      ["layers.0.key", 0, 16, 0],
      ["layers.0.value", 0, 16, 4 * 16 * 2 * ROW_BYTES],
      ["layers.1.key", 1, 64, 2 * 4 * 16 * 2 * ROW_BYTES],
      ["layers.1.value", 1, 64, (2 * 16 + 64) * 4 * 2 * ROW_BYTES],
    ]);
  });

  test("a copy to the pool and back keeps every byte of a block of each group", async () => {
    const transport = memoryTransport();
    const device = simulatedDevice();
    const caches = neuronCaches({ device, config, numBlocks: 4, numHeads: 2 });
    const staging = await createNeuronStaging({ transport, config, caches, poolBlocks: 4 });
    expect(
      staging.wireCaches.regions.map(({ blockLengthBytes }) => blockLengthBytes / (4 * ROW_BYTES)),
    ).toEqual([16, 64]);
    const block = (
      { offsetBytes, blockStrideBytes, blockLengthBytes }: KvCacheRegion,
      id: number,
    ) => Float64Array.of(offsetBytes + id * blockStrideBytes, blockLengthBytes);
    const written: Uint8Array[] = [];
    for (const [index, region] of caches.regions.entries()) {
      const bytes = Uint8Array.from(
        { length: region.blockLengthBytes },
        (_, at) => (at * 7 + index * 31) % 251,
      );
      written.push(bytes);
      await region.memory.scatter(block(region, 3), bytes.slice().buffer);
    }
    await staging.save("r", { device: [[3], [3]], wire: [[1], [2]] });
    await staging.load("r", { device: [[0], [1]], wire: [[1], [2]] });
    for (const [index, region] of caches.regions.entries()) {
      const bytes = new Uint8Array(await region.memory.gather(block(region, region.groupId)));
      expect(bytes, region.name).toEqual(written[index]);
    }
    await staging.close();
    await transport.close();
    await device.close();
  });

  test.each<[string, Partial<KvCacheRegion>, string]>([
    ["a region of no group", { groupId: -1 }, "name the groups -1, 0"],
    ["a region of another group than its layer", { groupId: 1 }, "name the groups 1, 0"],
    ["a region that groups share", { groupIds: [0, 1] }, "name the groups 0"],
  ])("refuses %s", (_, change, named) => {
    const caches = open();
    const regions = caches.regions.map((region, index) =>
      index < 2 ? { ...region, ...change } : region,
    );
    const shared: KvCaches = { ...caches, regions };
    expect(() => deviceLayers(shared)).toThrow(named);
    expect(() => deviceLayers(shared)).toThrow("Neuron stages no region that groups share");
  });
});
