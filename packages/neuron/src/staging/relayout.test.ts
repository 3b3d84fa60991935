import fc from "fast-check";
import { expect, test } from "vitest";
import { planeRuns } from "./relayout.js";

/**
 * Maps each byte of the pool to the byte of the device's K and V planes that the runs copy to it.
 */
function mapping(
  runs: readonly { device: Float64Array; wire: Float64Array }[],
): Map<number, number> {
  const expand = (table: Float64Array): number[] => {
    const bytes: number[] = [];
    for (let at = 0; at < table.length; at += 2) {
      for (let i = 0; i < (table[at + 1] ?? 0); i++) bytes.push((table[at] ?? 0) + i);
    }
    return bytes;
  };
  const landed = new Map<number, number>();
  for (const { device, wire } of runs) {
    const [from, to] = [expand(device), expand(wire)];
    expect(from.length).toBe(to.length);
    to.forEach((byte, index) => {
      expect(landed.has(byte), `byte ${byte} is written twice`).toBe(false);
      landed.set(byte, from[index] ?? -1);
    });
  }
  return landed;
}

test("every byte of the blocks on both sides is copied exactly once, to its place in [K|V] per head and token", () => {
  fc.assert(
    fc.property(
      fc.record({
        heads: fc.integer({ min: 1, max: 3 }),
        tokens: fc.integer({ min: 1, max: 5 }),
        rowBytes: fc.constantFrom(1, 2, 8),
        padding: fc.constantFrom(0, 3),
        device: fc.uniqueArray(fc.integer({ min: 0, max: 9 }), { minLength: 1, maxLength: 6 }),
      }),
      fc.integer({ min: 0, max: 5 }),
      ({ heads, tokens, rowBytes, padding, device }, shift) => {
        const wire = device.map((_, i) => 1 + ((i + shift) % device.length));
        const blockLengthBytes = heads * tokens * rowBytes;
        const strideBytes = blockLengthBytes + padding;
        const planeBytes = 10 * strideBytes;
        const shared = {
          blockLengthBytes,
          rowBytes,
          wireStrideBytes: 2 * blockLengthBytes + padding,
        };
        const halves = ([0, 1] as const).map((half) =>
          planeRuns(
            {
              ...shared,
              half,
              wireOffsetBytes: 64,
              deviceOffsetBytes: half * planeBytes,
              deviceStrideBytes: strideBytes,
            },
            device,
            wire,
          ),
        );
        const landed = mapping(halves);
        expect(landed.size).toBe(2 * blockLengthBytes * device.length);
        expect(new Set(landed.values()).size).toBe(landed.size);
        device.forEach((id, index) => {
          for (let head = 0; head < heads; head++) {
            for (let token = 0; token < tokens; token++) {
              for (const half of [0, 1]) {
                const cell = (head * tokens + token) * 2 + half;
                const at = 64 + (wire[index] ?? 0) * shared.wireStrideBytes + cell * rowBytes;
                const from =
                  half * planeBytes + id * strideBytes + (head * tokens + token) * rowBytes;
                for (let i = 0; i < rowBytes; i++) expect(landed.get(at + i)).toBe(from + i);
              }
            }
          }
        });
      },
    ),
  );
});

test("adjacent blocks are one run on the device", () => {
  const geometry = {
    deviceOffsetBytes: 0,
    deviceStrideBytes: 32,
    wireOffsetBytes: 0,
    wireStrideBytes: 64,
    blockLengthBytes: 32,
    rowBytes: 8,
    half: 0,
  } as const;
  expect([...planeRuns(geometry, [3, 4, 5, 7], [1, 2, 3, 4]).device]).toEqual([96, 96, 224, 32]);
});
