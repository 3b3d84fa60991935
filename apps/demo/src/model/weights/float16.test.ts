import { expect, test } from "vitest";
import { bfloat16ToFloat32, float16ToFloat32, float32ToFloat16 } from "./float16.js";

test("every half-precision value survives conversion to float32 and back", () => {
  const all = Uint16Array.from({ length: 65_536 }, (_, i) => i);
  const wide = float16ToFloat32(all);
  const back = float32ToFloat16(wide);
  for (const half of all) {
    if (Number.isNaN(wide[half])) {
      expect(half & 0x7c00).toBe(0x7c00);
      expect((back[half] ?? 0) & 0x7fff).toBe(0x7e00);
    } else if (back[half] !== half) expect(back[half]).toBe(half);
  }
});

test.each([
  [1, 0x3c00],
  [-2, 0xc000],
  [65_504, 0x7bff],
  [65_519.996, 0x7bff],
  [65_520, 0x7c00],
  [Number.POSITIVE_INFINITY, 0x7c00],
  [1 + 2 ** -11, 0x3c00], // a tie goes to the even neighbour, below
  [1 + 3 * 2 ** -11, 0x3c02], // and here above
  [1 + 2 ** -11 + 2 ** -20, 0x3c01],
  [2 ** -14, 0x0400],
  [2 ** -24, 0x0001],
  [2 ** -25, 0x0000],
  [2 ** -25 * 1.0001, 0x0001],
  [3 * 2 ** -25, 0x0002],
  [-(2 ** -30), 0x8000],
  [1e-42, 0x0000],
])("%d is rounded to the half 0x%s", (value, half) => {
  expect(float32ToFloat16(Float32Array.of(value))[0]).toBe(half);
});

test("bfloat16 is the upper half of a float32", () => {
  expect([...bfloat16ToFloat32(Uint16Array.of(0x3f80, 0xc040, 0x0001, 0x7f80))]).toEqual([
    1,
    -3,
    2 ** -133,
    Number.POSITIVE_INFINITY,
  ]);
});
