import { manualClock } from "@kv/testing/manual-clock";
import { expect, test } from "vitest";
import { type KeptObject, KeptObjects } from "./kept-objects.js";

let serial = 0;

function object(change: Partial<KeptObject> = {}): KeptObject {
  serial += 1;
  return {
    params: "{}",
    engineId: "d-1",
    requestId: `r-${serial}`,
    generation: 1,
    tokens: 100,
    blocks: [10 * serial, 10 * serial + 1],
    tpSize: 1,
    dcpSize: 1,
    isKv: false,
    server: "d",
    model: "m",
    digest: `digest-${serial}`,
    chunk: "c",
    bytes: 1000,
    ...change,
  };
}

function kept(ttlMs = 1000) {
  const clock = manualClock();
  return { clock, objects: new KeptObjects({ clock, ttlMs }) };
}

const pinned = (objects: KeptObjects) =>
  objects.status().map((one) => [one.objects, one.blocks, one.bytes]);

test("an object is given to one caller, and again only when that one gives it back", () => {
  const { objects } = kept();
  const one = object();
  expect(objects.keep(one, 10)).toEqual({ kept: true, release: [], expired: [] });
  expect(objects.find(["x", "c"]).tokens).toEqual([[100]]);
  expect(objects.claim(["other", one.digest])).toBe(one);
  expect(objects.claim([one.digest])).toBeUndefined();
  expect(objects.find(["c"]).tokens).toEqual([]);
  expect(pinned(objects)).toEqual([[0, 2, 1000]]);
  objects.giveBack(one);
  expect(objects.claim([one.digest])).toBe(one);
  objects.ended(one);
  objects.giveBack(one);
  expect(objects.claim([one.digest])).toBeUndefined();
  expect(objects.status()).toEqual([]);
});

test("of two objects with the same ids, each is given once", () => {
  const { objects } = kept();
  const [one, two] = [object({ digest: "same" }), object({ digest: "same" })];
  objects.keep(one, 10);
  objects.keep(two, 10);
  expect([objects.claim(["same"]), objects.claim(["same"]), objects.claim(["same"])]).toEqual([
    one,
    two,
    undefined,
  ]);
});

test("an object whose id comes twice is not given to anybody", () => {
  const { objects } = kept();
  const one = object();
  objects.keep(one, 10);
  expect(objects.keep({ ...one, digest: "other" }, 10)).toMatchObject({ kept: false });
  expect(objects.claim([one.digest, "other"])).toBeUndefined();
});

test("before the budget is exceeded, the object that waits for longest is given back", () => {
  const { objects } = kept();
  const [one, two, three, four] = [
    object(),
    object(),
    object(),
    object({ blocks: [1, 2, 3, 4, 5] }),
  ];
  expect(objects.keep(one, 4).release).toEqual([]);
  expect(objects.keep(two, 4).release).toEqual([]);
  expect(objects.keep(three, 4)).toEqual({ kept: true, release: [one], expired: [] });
  // What is being given back still counts as pinned, and its D is avoided until it is.
  expect(pinned(objects)).toEqual([[2, 6, 3000]]);
  expect(objects.find([]).crowded).toEqual(["d"]);
  objects.ended(one);
  expect(objects.find([]).crowded).toEqual([]);
  // One that a P reads is not given back.
  objects.claim([two.digest]);
  expect(objects.keep(four, 4)).toEqual({ kept: false, release: [three], expired: [] });
  expect(objects.claim([four.digest])).toBeUndefined();
});

test("blocks that several objects share count once", () => {
  const { objects } = kept();
  const [one, two] = [object({ blocks: [1, 2] }), object({ blocks: [1, 2, 3] })];
  objects.keep(one, 10);
  objects.keep(two, 10);
  expect(pinned(objects)).toEqual([[2, 3, 2000]]);
  objects.ended(two);
  expect(pinned(objects)).toEqual([[1, 2, 1000]]);
});

test("an object that has expired is not given, and its D is asked to free it while it may hold it", () => {
  const { clock, objects } = kept();
  const one = object();
  objects.keep(one, 10);
  clock.advance(1000);
  expect(objects.claim([one.digest])).toBeUndefined();
  expect(objects.find(["c"])).toMatchObject({ tokens: [], expired: [one] });
  const two = object();
  objects.keep(two, 10);
  clock.advance(60_000);
  expect(objects.find(["c"])).toMatchObject({ tokens: [], expired: [] });
  expect(objects.status()).toEqual([]);
});

test.each([
  ["another engine", { engineId: "d-2" }],
  ["a newer generation", { generation: 2 }],
])("what a D held is forgotten with %s", (_, change) => {
  const { objects } = kept();
  const [old, elsewhere, next] = [object(), object({ server: "e" }), object(change)];
  objects.keep(old, 10);
  objects.keep(elsewhere, 10);
  expect(objects.keep(next, 10).release).toEqual([]);
  expect(objects.claim([old.digest])).toBeUndefined();
  expect(objects.claim([elsewhere.digest])).toBe(elsewhere);
  expect(objects.claim([next.digest])).toBe(next);
});
