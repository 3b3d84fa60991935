import { createHash } from "node:crypto";
import { KvError } from "@kv/interface";
import { buildEngineTransferPlan, planRequest } from "@kv/plan";
import { proveEnginePlans } from "@kv/plan/prove";
import fc from "fast-check";
import { expect, test } from "vitest";
import { samplePair, sampleRank } from "../../../plan/src/sample-pair.test-support.js";
import { buildKinds, requestOfKinds } from "../../../plan/test/bytes/kind-scenes.js";
import { PROPERTY_TIMEOUT_MS } from "../../../plan/test/property-timeout.js";
import { likelyScene } from "../../../plan/test/prove/proof-scenes.js";
import { diffPlans, hashPlan, planFromDocument, planToDocument } from "../data/index.js";
import { canonicalJson } from "./plan-hash.js";
import { sha256Hex } from "./sha256.js";

const plan = buildEngineTransferPlan(samplePair(sampleRank({ kernelBlockSize: 32 }), sampleRank()));
const roundTrip = (given: typeof plan) =>
  planFromDocument(JSON.parse(JSON.stringify(planToDocument(given))));

test("a plan read back from JSON is equal, plans equal requests and is proven", {
  timeout: PROPERTY_TIMEOUT_MS,
}, () => {
  const drawn = { count: 0, refused: 0 };
  fc.assert(
    fc.property(likelyScene, (scene) => {
      let built: ReturnType<typeof buildKinds>;
      drawn.count += 1;
      try {
        built = buildKinds(scene);
      } catch (error) {
        expect(KvError.is(error)).toBe(true);
        drawn.refused += 1;
        return;
      }
      const read = built.plans.map(roundTrip);
      expect(read.map((one) => planToDocument(one))).toEqual(
        built.plans.map((one) => planToDocument(one)),
      );
      const blocks = requestOfKinds(scene);
      for (const [index, one] of read.entries()) {
        expect(planRequest(one, blocks)).toEqual(
          planRequest(built.plans[index] as typeof plan, blocks),
        );
      }
      const options = {
        remotes: built.remotes,
        numKvHeads: scene.numKvHeads,
        requests: [{ blocks }],
      };
      expect(proveEnginePlans(read, options).proven).toBe(true);
    }),
    { numRuns: 100 },
  );
  // However many are drawn: a good part of them has a plan.
  expect(drawn.refused).toBeLessThan(0.9 * drawn.count);
});

test("the hash is the SHA-256 of canonical JSON, regardless of the member order", () => {
  const document = planToDocument(plan);
  const expected = createHash("sha256").update(canonicalJson(document)).digest("hex");
  expect(hashPlan(plan)).toBe(expected);
  const reversed = Object.fromEntries(Object.entries(document).reverse());
  expect(hashPlan(planFromDocument(reversed))).toBe(expected);
  expect(canonicalJson({ b: 1, a: [undefined === null, "é"], c: undefined })).toBe(
    '{"a":[false,"é"],"b":1}',
  );
});

test.each([
  "",
  "abc",
  "é".repeat(40),
  "x".repeat(55),
  "x".repeat(56),
  "x".repeat(64),
  "y".repeat(1000),
])("SHA-256 of %j", (text) => {
  expect(sha256Hex(text)).toBe(createHash("sha256").update(text).digest("hex"));
});

test("without addresses, two runs of one deployment have equal hashes", () => {
  const moved = sampleRank({ kernelBlockSize: 32 });
  const again = buildEngineTransferPlan(
    samplePair(
      {
        ...moved,
        deviceId: 1,
        regions: moved.regions.map((region) => ({
          ...region,
          baseAddress: region.baseAddress + 4096,
        })),
      },
      sampleRank(),
    ),
  );
  expect(hashPlan(again)).not.toBe(hashPlan(plan));
  expect(hashPlan(again, { addresses: false })).toBe(hashPlan(plan, { addresses: false }));
  expect(diffPlans(plan, again, { addresses: false })).toEqual([]);
  const paths = diffPlans(plan, again).map((difference) => difference.path);
  expect(paths).toContain("local.regions.layer.0.baseAddress");
  expect(paths).toContain("local.deviceId");
  expect(paths).toContain("sources.0.lists.0.localTable.rows.0.0");
});

test("a difference names the member and both values", () => {
  const other = buildEngineTransferPlan({
    ...samplePair(sampleRank({ kernelBlockSize: 32 }), sampleRank()),
    masksUncovered: true,
  });
  expect(diffPlans(plan, other)).toEqual([{ path: "uncovered", one: "zeroed", other: "masked" }]);
  const fewer = sampleRank();
  const cut = buildEngineTransferPlan(
    samplePair(
      { ...fewer, regions: fewer.regions.slice(1) },
      { ...fewer, regions: fewer.regions.slice(1) },
    ),
  );
  const differences = diffPlans(buildEngineTransferPlan(samplePair()), cut, { addresses: false });
  expect(differences.map(({ path }) => path)).toContain("local.regions.layer.0");
  expect(differences.map(({ path }) => path)).not.toContain("local.regions.layer.1.name");
  expect(diffPlans(plan, cut, { limit: 2 })).toHaveLength(2);
});

/** Sets the member of a document at a path, such as "sources.0.lists". */
function setAt(document: unknown, path: string, value: unknown): void {
  const names = path.split(".");
  const last = names.pop() ?? "";
  const parent = names.reduce(
    (at, name) => at[name] as Record<string, unknown>,
    document as Record<string, unknown>,
  );
  parent[last] = value;
}

test.each<[path: string, value: unknown, message: string]>([
  ["version", 7, "version 7: this release reads version 1"],
  ["version", undefined, "version"],
  ["more", 1, "more"],
  ["form", "guess", "form"],
  ["local.deviceId", 2 ** 60, "local.deviceId"],
  ["sources.0.lists.0.localTable.rows.0", [1, 2, 3, 4], "rows.0"],
  ["groups", [], "groups is empty"],
  ["groupPlans", [], "groupPlans has 0 entries for 1 groups"],
  ["regionsOfGroup", [], "regionsOfGroup has 0"],
  ["regionsOfGroup", [[2]], "names 2, of 2 local"],
  ["headsOfRegion", [4], "headsOfRegion has 1"],
  ["localIndexing", [], "localIndexing has 0"],
  ["remoteIndexing", [], "remoteIndexing has 0"],
  ["groups", ["swa"], 'groupPlans.0.kind is "full", groups.0 is "swa"'],
  ["sources.0.segments", [2], "sources.0.segments names 2, of 2 segments"],
  ["sources.0.remoteIndexing", [], "sources.0.remoteIndexing has 0"],
  ["sources.0.groups", [1], "sources.0.groups names 1, of 1 groups"],
  ["segments.0.region", 2, "segments.0.region names 2, of 2 local regions"],
  ["segments.0.list", 1, "list names 1, of 1 lists of sources.0"],
  ["groupPlans.0.segments", [0, 9], "groupPlans.0.segments names 9, of 2 segments"],
])("refuses a document whose %s is %j", (path, value, message) => {
  const document: unknown = JSON.parse(JSON.stringify(planToDocument(plan)));
  setAt(document, path, value);
  expect(() => planFromDocument(document)).toThrow(message);
  expect(() => planFromDocument(document)).toThrow(
    expect.objectContaining({ code: "KV_PLAN_INVALID" }),
  );
});

test.each([null, undefined, 1, "plan", []])("refuses %j", (value) => {
  expect(() => planFromDocument(value)).toThrow(
    expect.objectContaining({ code: "KV_PLAN_INVALID" }),
  );
});
