import fc from "fast-check";
import { expect, test } from "vitest";
import { createSimdIdKernel, expandIds, scalarIdKernel } from "./id-kernel.js";

const simd = createSimdIdKernel();

test("this runtime has WebAssembly SIMD", () => {
  expect(simd).toBeDefined();
});

test("the SIMD kernel writes the same ids as the plain loop, and nothing else", () => {
  const lists = fc.record({
    ids: fc.array(fc.integer({ min: 0, max: 2 ** 30 }), { maxLength: 70 }),
    offsets: fc.array(fc.integer({ min: 0, max: 2 ** 30 }), { maxLength: 20 }),
    at: fc.integer({ min: 0, max: 5 }),
  });
  fc.assert(
    fc.property(lists, ({ ids, offsets, at }) => same(Int32Array.from(ids), Int32Array.from(offsets), at)),
    { numRuns: 500 },
  );
});

test.each([
  [1, 1],
  [32_768, 3],
  [32_769, 2],
  [70_001, 3],
  [1, 10_000],
  [300, 5000],
])("%i ids at %i offsets: the SIMD kernel and the plain loop agree", (count, regions) => {
  const ids = Int32Array.from({ length: count }, (_, index) => (index * 7) % 100_003);
  same(
    ids,
    Int32Array.from({ length: regions }, (_, index) => index * 1000),
    1,
  );
});

function same(ids: Int32Array, offsets: Int32Array, at: number): void {
  const length = ids.length * offsets.length;
  const [ours, plain, chosen] = [0, 1, 2].map(() => new Int32Array(at + length + 3).fill(-7)) as [
    Int32Array,
    Int32Array,
    Int32Array,
  ];
  expect(scalarIdKernel(plain, at, ids, offsets)).toBe(at + length);
  expect(simd?.(ours, at, ids, offsets)).toBe(at + length);
  expect(expandIds(chosen, at, ids, offsets)).toBe(at + length);
  expect(Buffer.compare(Buffer.from(ours.buffer), Buffer.from(plain.buffer))).toBe(0);
  expect(Buffer.compare(Buffer.from(chosen.buffer), Buffer.from(plain.buffer))).toBe(0);
}
