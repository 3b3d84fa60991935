import type { Agent, KvCaches, Platform, Staging, Transport } from "@kv/interface";
import { afterEach, beforeEach, expect, test } from "vitest";

type Open = () => Promise<{ transport: Transport; caches: KvCaches; close(): Promise<void> }>;

/** Device blocks to host buffers and back, as a transfer would find and leave them. */
export function stagingTests(create: () => Platform, open: Open): void {
  let stand: { transport: Transport; caches: KvCaches; close(): Promise<void> };
  let agent: Agent;
  let staging: Staging;

  beforeEach(async () => {
    stand = await open();
    agent = await stand.transport.createAgent();
    const platform = create();
    if (platform.createStaging === undefined) return expect.fail("the platform has no createStaging");
    const { transport, caches } = stand;
    staging = await platform.createStaging({ transport, agent, config: caches.config, caches });
  });
  afterEach(async () => {
    await staging.close();
    await agent.close();
    await stand.close();
  });

  const blocksOf = (caches: KvCaches, region: number, blockId: number): Uint8Array => {
    const cache = caches.regions[region];
    if (cache === undefined) return expect.fail(`no region ${region}`);
    const at = cache.offsetBytes + blockId * cache.blockStrideBytes;
    return cache.memory.bytes.subarray(at, at + cache.blockLengthBytes);
  };
  const groupsOf = (ids: readonly number[]): number[][] => stand.caches.config.groups.map(() => [...ids]);

  test("what peers see are host buffers with the regions of the device's caches, in memory of the transport", () => {
    const { wireCaches } = staging;
    expect(wireCaches.regions.map(({ name }) => name)).toEqual(stand.caches.regions.map(({ name }) => name));
    for (const { memory, memoryType } of wireCaches.regions) {
      expect(stand.transport.capabilities.memoryTypes).toContain(memoryType);
      expect(stand.caches.regions.some((region) => region.memory === memory)).toBe(false);
    }
  });

  test("save, then load of the same request, brings device blocks back as they were, and only those", async () => {
    const ids = [3, 1];
    for (const [region] of stand.caches.regions.entries()) {
      for (let id = 0; id < 5; id++) blocksOf(stand.caches, region, id).fill(16 * region + id + 1);
    }
    await staging.save("r1", groupsOf(ids));
    for (const [region] of stand.caches.regions.entries()) {
      for (let id = 0; id < 5; id++) blocksOf(stand.caches, region, id).fill(0xee);
    }
    await staging.load("r1", groupsOf(ids));
    for (const [region] of stand.caches.regions.entries()) {
      for (let id = 0; id < 5; id++) {
        const expected = ids.includes(id) ? 16 * region + id + 1 : 0xee;
        expect(blocksOf(stand.caches, region, id).every((byte) => byte === expected)).toBe(true);
      }
    }
  });
}
