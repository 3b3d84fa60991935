import type {
  KvCacheRegion,
  KvCaches,
  Platform,
  StagedBlocks,
  Staging,
  Transport,
} from "@kv/interface";
import { afterEach, beforeEach, expect, test } from "vitest";

/** Transport and device caches for the staging tests. */
export interface StagingFixture {
  /** Allocates the pool. */
  readonly transport: Transport;
  /**
   * Caches of at least 8 blocks in device memory. The tests reach them by `gather` and `scatter`
   * only.
   */
  readonly caches: KvCaches;
  /** Names of the regions that peers see. @default those of the device's regions */
  readonly wireNames?: readonly string[] | undefined;
  /** Closes transport and memory, after the staging is closed. */
  close(): Promise<void>;
}

/** Fewer blocks than the device has. */
const POOL_BLOCKS = 4;

/** Tests copies between device blocks and pool blocks. */
export function stagingTests(create: () => Platform, open: () => Promise<StagingFixture>): void {
  let fixture: StagingFixture;
  let staging: Staging;

  beforeEach(async () => {
    fixture = await open();
    const platform = create();
    if (platform.createStaging === undefined)
      return expect.fail("the platform has no createStaging");
    const { transport, caches } = fixture;
    staging = await platform.createStaging({
      transport,
      caches,
      config: caches.config,
      poolBlocks: POOL_BLOCKS,
    });
  });
  afterEach(async () => {
    await staging.close();
    await fixture.close();
  });

  const runOf = (region: KvCacheRegion, id: number): Float64Array =>
    Float64Array.of(region.offsetBytes + id * region.blockStrideBytes, region.blockLengthBytes);
  const fill = (region: KvCacheRegion, id: number, byte: number) =>
    region.memory.scatter(
      runOf(region, id),
      new Uint8Array(region.blockLengthBytes).fill(byte).buffer,
    );
  const bytesOf = async (region: KvCacheRegion, id: number) =>
    new Uint8Array(await region.memory.gather(runOf(region, id)));
  async function fillAll(byteOf: (region: number, id: number) => number): Promise<void> {
    for (const [index, region] of fixture.caches.regions.entries()) {
      for (let id = 0; id < region.numBlocks; id++) await fill(region, id, byteOf(index, id));
    }
  }
  const pairs = (device: readonly number[], wire: readonly number[]): StagedBlocks => ({
    device: fixture.caches.config.groups.map(() => [...device]),
    wire: fixture.caches.config.groups.map(() => [...wire]),
  });

  test("peers see the layers in registrable memory of a bounded pool", () => {
    const { wireCaches } = staging;
    const names = fixture.wireNames ?? fixture.caches.regions.map(({ name }) => name);
    expect(wireCaches.regions.map(({ name }) => name)).toEqual(names);
    for (const region of wireCaches.regions) {
      expect(fixture.transport.capabilities.memoryTypes).toContain(region.memoryType);
      expect(fixture.caches.regions.some(({ memory }) => memory === region.memory)).toBe(false);
      expect(region.numBlocks).toBe(POOL_BLOCKS);
      const last =
        region.offsetBytes + (POOL_BLOCKS - 1) * region.blockStrideBytes + region.blockLengthBytes;
      expect(last).toBeLessThanOrEqual(region.memory.lengthBytes);
    }
    const lengthOf = (caches: KvCaches) =>
      caches.regions.reduce((sum, region) => sum + region.blockLengthBytes, 0);
    expect(lengthOf(wireCaches)).toBe(lengthOf(fixture.caches));
  });

  test("save, then load into other blocks, copies every byte and touches no other block", async () => {
    await fillAll((region, id) => 16 * region + id + 1);
    await staging.save("r1", pairs([7, 1], [2, 3]));
    await fillAll(() => 0xee);
    await staging.load("r1", pairs([0, 5], [2, 3]));
    for (const [index, region] of fixture.caches.regions.entries()) {
      for (let id = 0; id < region.numBlocks; id++) {
        const expected = id === 0 ? 16 * index + 8 : id === 5 ? 16 * index + 2 : 0xee;
        expect((await bytesOf(region, id)).every((byte) => byte === expected)).toBe(true);
      }
    }
  });

  test("two requests in the pool do not affect each other", async () => {
    await fillAll((_, id) => id + 1);
    await Promise.all([
      staging.save("a", pairs([0, 1], [1, 2])),
      staging.save("b", pairs([6], [3])),
    ]);
    await Promise.all([
      staging.load("b", pairs([2], [3])),
      staging.load("a", pairs([3, 4], [1, 2])),
    ]);
    for (const region of fixture.caches.regions) {
      for (const [id, byte] of [
        [2, 7],
        [3, 1],
        [4, 2],
      ] as const) {
        expect((await bytesOf(region, id)).every((value) => value === byte)).toBe(true);
      }
    }
  });

  test("block ids out of range are rejected", async () => {
    const refused = { code: "KV_STAGING_FAILED" };
    await expect(staging.save("r", pairs([0], [POOL_BLOCKS]))).rejects.toMatchObject(refused);
    await expect(staging.load("r", pairs([1_000_000], [1]))).rejects.toMatchObject(refused);
  });
}
