import { readFileSync } from "node:fs";
import { describe, expect, test } from "vitest";
import { cacheElementBytes, whyUncut } from "./block-format.js";

interface Formats {
  readonly cacheDtypes: Readonly<Record<string, string>>;
  readonly kvHeads: number;
  readonly headSlots: Readonly<Record<string, number>>;
}

/** Made by tools/vllm/cache_formats.py from vLLM 0.33's own code. */
const vllm = JSON.parse(
  readFileSync(new URL("../../fixtures/vllm-cache-formats.json", import.meta.url), "utf8"),
) as Formats;

describe("vLLM's cache dtypes (vllm#52516)", () => {
  test.each(Object.entries(vllm.cacheDtypes))(
    "%s (%s) is known, and cut unless its scales lie apart",
    (name, mode) => {
      // Latents with scales are a FP8_PER_TENSOR too: their names say it.
      const isApart = mode === "NVFP4" || name.endsWith("_ds_mla");
      const why = isApart
        ? `blocks of cache dtype "${name}" do not keep heads and tokens apart`
        : undefined;
      expect(whyUncut(name, "FLASH_ATTN")).toBe(why);
    },
  );

  test("a type that is none of them is refused by its name", () => {
    for (const name of ["nvfp8", "int8", "FP8", ""]) {
      expect(whyUncut(name, "FLASH_ATTN")).toBe(
        `cache dtype "${name}" is not known to keep heads and tokens apart`,
      );
    }
  });

  test("names of elements may be torch's", () => {
    expect(whyUncut("torch.bfloat16", "FLASH_ATTN")).toBeUndefined();
    expect(cacheElementBytes("auto", "torch.float32")).toBe(4);
    expect(cacheElementBytes("fp8_e4m3", "torch.float32")).toBe(1);
    expect(cacheElementBytes("torch.float8_e5m2", "bfloat16")).toBe(1);
    expect(cacheElementBytes("nvfp4", "bfloat16")).toBeUndefined();
    expect(cacheElementBytes("auto", "auto")).toBeUndefined();
  });
});

test.each(Object.entries(vllm.headSlots))(
  "blocks of %s have %i slots for 4 heads",
  (backend, slots) => {
    const isApart = slots < vllm.kvHeads;
    const why = isApart
      ? `blocks of ${backend} hold the K of all heads before the V of all heads`
      : undefined;
    expect(whyUncut("auto", backend)).toBe(why);
  },
);
