import fc from "fast-check";
import { expect, test } from "vitest";
import { kvBytes } from "../../engine/cache/kv-layout.js";
import { packWire, unpackWire } from "./wire-order.js";

test("the key of a token comes before its value, tokens of a head follow one another, then heads, then layers", () => {
  // Each number encodes layer, head, token and element; values of V are negative.
  const layer = (number: number) => {
    const key = Float32Array.from({ length: 2 * 3 * 2 }, (_, i) => {
      const [head, token, element] = [Math.floor(i / 6), Math.floor(i / 2) % 3, i % 2];
      return 1000 + number * 100 + head * 10 + token + element / 10;
    });
    return { key, value: key.map((entry) => -entry) };
  };
  const wire = packWire([layer(0), layer(1)], { kvHeads: 2, headDim: 2, total: 3, from: 1, to: 3 });
  const expected = [1001, 1002, 1011, 1012, 1101, 1102, 1111, 1112].flatMap((token) => [
    token,
    token + 0.1,
    -token,
    -(token + 0.1),
  ]);
  expect([...new Float32Array(wire)]).toEqual(expected.map(Math.fround));
});

test("unpack is the inverse of pack", () => {
  const size = fc.integer({ min: 1, max: 5 });
  fc.assert(
    fc.property(
      size,
      size,
      size,
      fc.integer({ min: 0, max: 9 }),
      (layers, kvHeads, headDim, tokens) => {
        const shape = { layers, kvHeads, headDim };
        const wire = Float32Array.from({ length: kvBytes(shape, tokens) / 4 }, (_, i) => i);
        const apart = unpackWire(wire.buffer, shape, tokens);
        const again = packWire(apart, { kvHeads, headDim, total: tokens, from: 0, to: tokens });
        expect(new Float32Array(again)).toEqual(wire);
      },
    ),
  );
});
