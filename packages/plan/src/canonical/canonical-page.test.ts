import { readFileSync } from "node:fs";
import { gunzipSync } from "node:zlib";
import { KvError } from "@kv/interface";
import fc from "fast-check";
import { describe, expect, it, test } from "vitest";
import { type CanonicalLayer, canonicalPage, proveCanonical } from "./canonical-page.js";

interface Case {
  readonly in: {
    readonly form: string;
    readonly heads: number;
    readonly tokens: number;
    readonly headBytes: number;
    readonly tp: number;
    readonly dcp: number;
    readonly pcp: number;
    readonly interleave: number;
    readonly rank: number;
  };
  readonly out: {
    readonly page: number;
    readonly local: number;
    readonly writers: number;
    readonly writer: number;
    /** `[local, canonical, size, count, local stride, canonical stride]`. */
    readonly runs: readonly (readonly number[])[];
  } | null;
}

// Made by vLLM 0.33's `_layer_mapping`.
const file = new URL("../../fixtures/canonical-pages-0.33.json.gz", import.meta.url);
const CASES = JSON.parse(gunzipSync(readFileSync(file)).toString()) as readonly Case[];

function layerOf({ in: given }: Case): CanonicalLayer {
  const [form = "", order = "NHD"] = given.form.split("-");
  return {
    form: form === "mla" ? "latent" : (form as "packed" | "split"),
    order: order as "HND" | "NHD",
    numKvHeads: given.heads,
    blockSize: given.tokens,
    headBytes: given.headBytes,
    tpSize: given.tp,
    dcpSize: given.dcp,
    pcpSize: given.pcp,
    interleave: given.interleave,
  };
}

/** Where each byte of a rank's block is in the page. */
function bytesOf(runs: readonly (readonly number[])[]): Map<number, number> {
  const places = new Map<number, number>();
  for (const [local = 0, canonical = 0, size = 0, count = 0, localStep = 0, step = 0] of runs)
    for (let fragment = 0; fragment < count; fragment += 1)
      for (let byte = 0; byte < size; byte += 1)
        places.set(local + fragment * localStep + byte, canonical + fragment * step + byte);
  return places;
}

describe("a rank's place in the canonical page is vLLM's", () => {
  test.each([...new Set(CASES.map(({ in: { form } }) => form))])("%s", (form) => {
    for (const each of CASES.filter(({ in: given }) => given.form === form)) {
      const { in: given, out } = each;
      const layer = layerOf(each);
      const what = JSON.stringify(given);
      if (out === null) {
        expect(() => canonicalPage(layer, given.rank), what).toThrow(KvError);
        continue;
      }
      const { runs, ...page } = canonicalPage(layer, given.rank);
      expect(page, what).toEqual({
        pageBytes: out.page,
        localBytes: out.local,
        numWriters: out.writers,
        writerIndex: out.writer,
      });
      const ours = runs.map(({ localOffset, canonicalOffset, lengthBytes }) => [
        ...[localOffset, canonicalOffset, lengthBytes, 1, 0, 0],
      ]);
      expect(bytesOf(ours), what).toEqual(bytesOf(out.runs));
    }
  });
});

const layers = fc.record({
  form: fc.constantFrom("packed", "split", "latent"),
  order: fc.constantFrom("HND", "NHD"),
  headsLog: fc.integer({ min: 0, max: 3 }),
  blockSize: fc.constantFrom(2, 4, 8),
  headBytes: fc.constantFrom(1, 4),
});

test("TP 1, 2, 4 and 8 write, and TP 1, 2, 4 and 8 read: every byte arrives once", () => {
  fc.assert(
    fc.property(layers, ({ headsLog, ...layer }) => {
      const numKvHeads = layer.form === "latent" ? 1 : 2 ** headsLog;
      for (const writer of [1, 2, 4, 8])
        for (const reader of [1, 2, 4, 8])
          proveCanonical(
            { ...layer, numKvHeads, tpSize: writer },
            { ...layer, numKvHeads, tpSize: reader },
          );
    }),
    { numRuns: 30 },
  );
});

test("an engine with context parallelism writes what one without it reads", () => {
  const plain = { form: "packed", order: "HND", numKvHeads: 2, headBytes: 2 } as const;
  const writer = { ...plain, blockSize: 4, tpSize: 4, dcpSize: 2, pcpSize: 2, interleave: 2 };
  proveCanonical(writer, { ...plain, blockSize: 16, tpSize: 2 });
  proveCanonical({ ...plain, blockSize: 16, tpSize: 2 }, writer);
});

it("finds a page in another order, and one of other tokens", () => {
  const layer = {
    form: "packed",
    order: "HND",
    numKvHeads: 2,
    blockSize: 4,
    headBytes: 2,
    tpSize: 1,
  } as const;
  expect(() => proveCanonical(layer, { ...layer, order: "NHD" })).toThrow(
    "canonical page: byte 4 of rank 0 is K of head 1, token 0, byte 0, and K of head 0, token 1",
  );
  expect(() => proveCanonical(layer, { ...layer, blockSize: 8 })).toThrow("a page has");
  expect(() => proveCanonical(layer, { ...layer, form: "split" })).toThrow(KvError);
});
