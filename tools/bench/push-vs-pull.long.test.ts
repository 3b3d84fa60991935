// A long suite: a benchmark's own test.
import { expect, test } from "vitest";
import { onLink, POINT } from "./push-vs-pull.js";
import { MODEL } from "./virtual-deployment.js";

const ONE = { ...POINT, outputTokens: 2 };

test("a pull has nine hops and a push six; the bytes take their time on the link, and layer-wise push hides them", async () => {
  const still = { linkGbits: 25, hopMs: 0, rangeMs: 0 };
  const [withHops = []] = await onLink({ ...still, hopMs: 1 }, [ONE]);
  const [without = []] = await onLink(still, [ONE]);
  expect(withHops.map((ms, i) => Math.round(ms - (without[i] ?? 0)))).toEqual([9, 6, 6]);
  const computeMs = (MODEL.forwardMsPer512Tokens * 1025) / 512;
  const bytesMs = (65 * 16 * MODEL.kvBytesPerToken) / (still.linkGbits * 125_000);
  const [pull = 0, push = 0, layers = 0] = without;
  expect(Math.abs(pull - computeMs - bytesMs)).toBeLessThan(1);
  expect(Math.abs(push - pull)).toBeLessThan(0.1);
  expect(layers).toBeLessThan(computeMs + bytesMs / 3);
}, 180_000);

test("the figures do not depend on how long the clock waits for sockets, and repeat", async () => {
  const link = { linkGbits: 100, hopMs: 0.25 };
  const points = [{ ...ONE, atOnce: 8 }];
  const found = await onLink(link, points);
  expect(await onLink({ ...link, turns: 72 }, points)).toEqual(found);
}, 180_000);
