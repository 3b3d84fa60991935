import type {
  KvCacheRegion,
  KvCacheShapeOptions,
  KvCaches,
  Platform,
  PlatformEngineSettings,
  StagedBlocks,
  Staging,
  Transport,
} from "@kv/interface";
import { afterEach, beforeEach, describe, expect, test } from "vitest";
import { expectThrown } from "./expect-error.js";
import { TIME_LIMIT_MS } from "./time-limits.js";

/** Options of `platformSuite`. */
export interface PlatformSuiteOptions {
  readonly name: string;
  readonly create: () => Platform;
  /** Settings that work on this platform. @default {} */
  readonly settings?: PlatformEngineSettings | undefined;
  /** `check` must reject each of them. @default none */
  readonly refusedSettings?: readonly PlatformEngineSettings[] | undefined;
  /** A model's config and longest sequence in tokens. @default `max_position_embeddings` of 2048 */
  readonly model?:
    | { readonly config: Readonly<Record<string, unknown>>; readonly maxModelLen: number }
    | undefined;
  /** Absent: staging is not tested. */
  readonly staging?: (() => Promise<StagingFixture>) | undefined;
}

const SHAPE: KvCacheShapeOptions = { numBlocks: 7, blockSize: 16, numKvHeads: 3, headSize: 64 };

/** Tests a platform against the contract of `Platform`. */
export function platformSuite(options: PlatformSuiteOptions): void {
  const model = options.model ?? { config: { max_position_embeddings: 2048 }, maxModelLen: 2048 };
  const product = (shape: readonly number[]): number => shape.reduce((all, size) => all * size, 1);

  describe(`platform ${options.name}`, { timeout: TIME_LIMIT_MS }, () => {
    test("it has a name and consistent capabilities", () => {
      const { deviceType, capabilities } = options.create();
      expect(deviceType).toMatch(/^[a-z][a-z0-9_]*$/);
      expect(capabilities.bufferDevices.length).toBeGreaterThan(0);
      expect(new Set(capabilities.bufferDevices).size).toBe(capabilities.bufferDevices.length);
      for (const type of capabilities.registersAs) expect(["DRAM", "VRAM"]).toContain(type);
      expect(Number.isInteger(capabilities.maxConcurrentBatches)).toBe(true);
      expect(capabilities.maxConcurrentBatches).toBeGreaterThanOrEqual(1);
    });

    test("a platform whose memory cannot be registered has staging", () => {
      const platform = options.create();
      if (platform.capabilities.registersAs.length === 0)
        expect(platform.createStaging).toBeTypeOf("function");
    });

    test("the cache shape has room for K and V of every head, token and block", () => {
      const shape = options.create().kvCacheShape(SHAPE);
      expect(shape.every((size) => Number.isInteger(size) && size > 0)).toBe(true);
      expect(product(shape)).toBe(7 * 16 * 3 * 64 * 2);
      const more = options.create().kvCacheShape({ ...SHAPE, numBlocks: 14 });
      expect(more.length).toBe(shape.length);
      expect(product(more)).toBe(2 * product(shape));
    });

    test("unknown options and settings are ignored", () => {
      const platform = options.create();
      const shape = platform.kvCacheShape(SHAPE);
      expect(platform.kvCacheShape({ ...SHAPE, a_key_of_tomorrow: [1] })).toEqual(shape);
      const warnings = platform.check(options.settings ?? {});
      expect(platform.check({ ...options.settings, a_key_of_tomorrow: { nested: true } })).toEqual(
        warnings,
      );
      for (const { setting, message } of warnings) {
        expect(setting.length).toBeGreaterThan(0);
        expect(message.length).toBeGreaterThan(10);
      }
      expect(platform.maxModelLen({ ...model.config, a_key_of_tomorrow: 1 })).toBe(
        model.maxModelLen,
      );
    });

    test("check rejects settings that cannot work, with the setting in the message", () => {
      for (const settings of options.refusedSettings ?? []) {
        const error = expectThrown(
          () => options.create().check(settings),
          "KV_PLATFORM_UNSUPPORTED",
        );
        expect(Object.keys(settings).some((key) => error.message.includes(key))).toBe(true);
      }
    });

    test("maxModelLen reads the model's config and rejects a config without it", () => {
      const platform = options.create();
      expect(platform.maxModelLen(model.config)).toBe(model.maxModelLen);
      for (const config of [
        {},
        { max_position_embeddings: "many" },
        { max_position_embeddings: -1 },
      ]) {
        expectThrown(
          () => platform.maxModelLen(config),
          "KV_CONFIG_INVALID",
          "KV_MODEL_UNSUPPORTED",
        );
      }
    });

    const { staging } = options;
    if (staging !== undefined) describe("staging", () => stagingTests(options.create, staging));
  });
}

/** Transport and device caches for the staging tests. */
export interface StagingFixture {
  /** Allocates the pool. */
  readonly transport: Transport;
  /** At least 8 blocks in device memory, reached only by `gather` and `scatter`. */
  readonly caches: KvCaches;
  /** Regions that peers see. @default those of the device's regions */
  readonly wireNames?: readonly string[] | undefined;
  /** Closes transport and memory, after the staging. */
  close(): Promise<void>;
}

/** Fewer blocks than the device has. */
const POOL_BLOCKS = 4;

function stagingTests(create: () => Platform, open: () => Promise<StagingFixture>): void {
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
  }, TIME_LIMIT_MS);
  afterEach(async () => {
    await staging.close();
    await fixture.close();
  }, TIME_LIMIT_MS);

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
