import type { KvCacheShapeOptions, Platform, PlatformEngineSettings } from "@kv/interface";
import { describe, expect, test } from "vitest";
import { expectThrown } from "./expect-error.js";
import { type StagingFixture, stagingTests } from "./platform/staging.js";

export type { StagingFixture } from "./platform/staging.js";

/** Options of `platformSuite`. */
export interface PlatformSuiteOptions {
  /** Name in the titles of the tests. */
  readonly name: string;
  /** Creates the platform. */
  readonly create: () => Platform;
  /** Settings that work on this platform. @default {} */
  readonly settings?: PlatformEngineSettings | undefined;
  /** Settings that `check` must reject, each on its own. @default none */
  readonly refusedSettings?: readonly PlatformEngineSettings[] | undefined;
  /**
   * Config of a model, and its longest sequence in tokens. @default `max_position_embeddings` of
   * 2048
   */
  readonly model?:
    | { readonly config: Readonly<Record<string, unknown>>; readonly maxModelLen: number }
    | undefined;
  /** Creates what the staging tests need. Absent: staging is not tested. */
  readonly staging?: (() => Promise<StagingFixture>) | undefined;
}

const SHAPE: KvCacheShapeOptions = { numBlocks: 7, blockSize: 16, numKvHeads: 3, headSize: 64 };

/** Tests a platform against the contract of `Platform`. */
export function platformSuite(options: PlatformSuiteOptions): void {
  const model = options.model ?? { config: { max_position_embeddings: 2048 }, maxModelLen: 2048 };
  const product = (shape: readonly number[]): number => shape.reduce((all, size) => all * size, 1);

  describe(`platform ${options.name}`, () => {
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
