import type { KvCacheShapeOptions, Platform, PlatformEngineSettings } from "@kv/interface";
import { describe, expect, test } from "vitest";
import { expectThrown } from "./expect-error.js";
import { type StagingFixture, stagingTests } from "./platform/staging.js";

export type { StagingFixture } from "./platform/staging.js";

export interface PlatformSuiteOptions {
  /** Heads the suite's tests. */
  readonly name: string;
  readonly create: () => Platform;
  /** `kv_buffer_device` and other settings that work here; `{}` by default. */
  readonly settings?: PlatformEngineSettings;
  /** Settings that cannot work here, each by itself. */
  readonly refusedSettings?: readonly PlatformEngineSettings[];
  /** A config of a model, and its longest sequence; a Llama-like one of 2048 by default. */
  readonly model?: { readonly config: Readonly<Record<string, unknown>>; readonly maxModelLen: number };
  /** For a platform that stages: what it stages between. */
  readonly staging?: () => Promise<StagingFixture>;
}

const SHAPE: KvCacheShapeOptions = { numBlocks: 7, blockSize: 16, numKvHeads: 3, headSize: 64 };

/** What the doc comments of `Platform` promise, as tests. */
export function platformSuite(options: PlatformSuiteOptions): void {
  const model = options.model ?? { config: { max_position_embeddings: 2048 }, maxModelLen: 2048 };
  const product = (shape: readonly number[]): number => shape.reduce((all, size) => all * size, 1);

  describe(`platform ${options.name}`, () => {
    test("it has a name, and capabilities that are consistent", () => {
      const { deviceType, capabilities } = options.create();
      expect(deviceType).toMatch(/^[a-z][a-z0-9_]*$/);
      expect(capabilities.bufferDevices.length).toBeGreaterThan(0);
      expect(new Set(capabilities.bufferDevices).size).toBe(capabilities.bufferDevices.length);
      for (const type of capabilities.registersAs) expect(["DRAM", "VRAM"]).toContain(type);
      expect(Number.isInteger(capabilities.maxConcurrentBatches)).toBe(true);
      expect(capabilities.maxConcurrentBatches).toBeGreaterThanOrEqual(1);
    });

    test("memory that cannot be registered is staged", () => {
      const platform = options.create();
      if (platform.capabilities.registersAs.length === 0)
        expect(platform.createStaging).toBeTypeOf("function");
    });

    test("a layer's cache holds K and V of every head of every token of every block", () => {
      const shape = options.create().kvCacheShape(SHAPE);
      expect(shape.every((size) => Number.isInteger(size) && size > 0)).toBe(true);
      expect(product(shape)).toBe(7 * 16 * 3 * 64 * 2);
      const more = options.create().kvCacheShape({ ...SHAPE, numBlocks: 14 });
      expect(more.length).toBe(shape.length);
      expect(product(more)).toBe(2 * product(shape));
    });

    test("options and settings that it does not know are left alone", () => {
      const platform = options.create();
      const shape = platform.kvCacheShape(SHAPE);
      expect(platform.kvCacheShape({ ...SHAPE, a_key_of_tomorrow: [1] })).toEqual(shape);
      const warnings = platform.check(options.settings ?? {});
      expect(platform.check({ ...options.settings, a_key_of_tomorrow: { nested: true } })).toEqual(warnings);
      for (const { setting, message } of warnings) {
        expect(setting.length).toBeGreaterThan(0);
        expect(message.length).toBeGreaterThan(10);
      }
      expect(platform.maxModelLen({ ...model.config, a_key_of_tomorrow: 1 })).toBe(model.maxModelLen);
    });

    test("settings that cannot work are refused, with the reason", () => {
      for (const settings of options.refusedSettings ?? []) {
        const error = expectThrown(() => options.create().check(settings), "KV_PLATFORM_UNSUPPORTED");
        expect(Object.keys(settings).some((key) => error.message.includes(key))).toBe(true);
      }
    });

    test("the longest sequence comes from the model's config, and one without it is refused", () => {
      const platform = options.create();
      expect(platform.maxModelLen(model.config)).toBe(model.maxModelLen);
      for (const config of [{}, { max_position_embeddings: "many" }, { max_position_embeddings: -1 }]) {
        expectThrown(() => platform.maxModelLen(config), "KV_CONFIG_INVALID", "KV_MODEL_UNSUPPORTED");
      }
    });

    const { staging } = options;
    if (staging !== undefined) describe("staging", () => stagingTests(options.create, staging));
  });
}
