import { KvError, type KvErrorCode } from "@kv/interface";
import { expect, test } from "vitest";
import { buildEngineTransferPlan, planRequest } from "./index.js";
import { samplePair, sampleRank } from "./sample-pair.test-support.js";

const region = (change: Record<string, unknown>) => {
  const rank = sampleRank();
  return { ...rank, regions: rank.regions.map((one, index) => (index === 1 ? { ...one, ...change } : one)) };
};

test.each<[string, () => unknown, KvErrorCode, RegExp]>([
  [
    "TP sizes that do not divide",
    () =>
      buildEngineTransferPlan({
        ...samplePair(sampleRank({ tpSize: 2 }), sampleRank({ tpSize: 3 })),
        numKvHeads: 6,
      }),
    "KV_TOPOLOGY_INVALID",
    /local TP size 2 and remote TP size 3/,
  ],
  [
    "heads that cannot be split",
    () =>
      buildEngineTransferPlan({
        ...samplePair(sampleRank({ tpSize: 3 }), sampleRank({ tpSize: 3 })),
        numKvHeads: 4,
      }),
    "KV_TOPOLOGY_INVALID",
    /4 KV heads cannot be split over TP size 3/,
  ],
  [
    "a local block smaller than the remote's",
    () => buildEngineTransferPlan(samplePair(sampleRank(), sampleRank({ kernelBlockSize: 32 }))),
    "KV_PLAN_UNSUPPORTED",
    /local 16, remote 32/,
  ],
  [
    "block sizes that do not divide",
    () =>
      buildEngineTransferPlan(
        samplePair(sampleRank({ kernelBlockSize: 48 }), sampleRank({ kernelBlockSize: 32 })),
      ),
    "KV_PLAN_UNSUPPORTED",
    /local 48, remote 32/,
  ],
  [
    "another layout",
    () => buildEngineTransferPlan(samplePair(sampleRank({ layout: "LBNHC" }), sampleRank())),
    "KV_PLAN_INCOMPATIBLE",
    /local LBNHC, remote LBHNC/,
  ],
  [
    "a layout that no conversion covers",
    () =>
      buildEngineTransferPlan({
        ...samplePair(sampleRank(), sampleRank({ layout: "LBNHC" })),
        conversions: ["hnd-to-nhd"],
      }),
    "KV_PLAN_INCOMPATIBLE",
    /local LBHNC, remote LBNHC/,
  ],
  [
    "another attention backend",
    () => buildEngineTransferPlan(samplePair(sampleRank(), sampleRank({ attentionBackend: "CPU_ATTN" }))),
    "KV_PLAN_INCOMPATIBLE",
    /local FLASH_ATTN, remote CPU_ATTN/,
  ],
  [
    "splitting a token-major block",
    () =>
      buildEngineTransferPlan(
        samplePair(sampleRank({ tpSize: 2, layout: "LBNHC" }), sampleRank({ layout: "LBNHC" })),
      ),
    "KV_PLAN_UNSUPPORTED",
    /layout/,
  ],
  [
    "block sizes that differ where the order of tokens is not known",
    () =>
      buildEngineTransferPlan(
        samplePair(
          sampleRank({ kernelBlockSize: 32, attentionBackend: "CPU_ATTN" }),
          sampleRank({ attentionBackend: "CPU_ATTN" }),
        ),
      ),
    "KV_PLAN_UNSUPPORTED",
    /32, 16/,
  ],
  [
    "another name of a region",
    () => buildEngineTransferPlan(samplePair(sampleRank(), region({ name: "layer.7" }))),
    "KV_PLAN_INCOMPATIBLE",
    /region 1 .* local layer.1, remote layer.7/,
  ],
  [
    "another number of regions",
    () =>
      buildEngineTransferPlan(
        samplePair(sampleRank(), { ...sampleRank(), regions: sampleRank().regions.slice(1) }),
      ),
    "KV_PLAN_INCOMPATIBLE",
    /local 2, remote 1/,
  ],
  [
    "a block length that does not fit",
    () => buildEngineTransferPlan(samplePair(sampleRank(), region({ blockLengthBytes: 511 }))),
    "KV_PLAN_INCOMPATIBLE",
    /"layer.1".* local 512, remote 511/,
  ],
  [
    "overlapping blocks",
    () => buildEngineTransferPlan(samplePair(sampleRank(), region({ blockStrideBytes: 10 }))),
    "KV_PLAN_INVALID",
    /remote rank 0, region 1 .*512 bytes overlap at a stride of 10/,
  ],
  [
    "two regions of one name",
    () => buildEngineTransferPlan(samplePair(region({ name: "layer.0" }), sampleRank())),
    "KV_PLAN_INVALID",
    /the local rank: two regions are named "layer.0"/,
  ],
  [
    "an address that is not exact",
    () => buildEngineTransferPlan(samplePair(sampleRank(), region({ baseAddress: 2 ** 53 - 512 }))),
    "KV_PLAN_INVALID",
    /2\^53/,
  ],
  [
    "a group that the model lacks",
    () => buildEngineTransferPlan(samplePair(sampleRank(), region({ groupId: 1 }))),
    "KV_PLAN_INVALID",
    /groupId 1, but the model has 1/,
  ],
  [
    "a block that does not divide into its heads and tokens",
    () =>
      buildEngineTransferPlan(
        samplePair(sampleRank({ blockLengthBytes: 500 }), sampleRank({ blockLengthBytes: 500 })),
      ),
    "KV_PLAN_INVALID",
    /500 bytes does not divide into 4 heads of 16 tokens/,
  ],
  [
    "another group of a region",
    () => buildEngineTransferPlan(samplePair(sampleRank(), region({ groupId: 1 }), ["full", "swa"])),
    "KV_PLAN_UNSUPPORTED",
    /local 0, remote 1/,
  ],
  [
    "mixed memory",
    () => buildEngineTransferPlan(samplePair(sampleRank(), region({ memoryType: "VRAM" }))),
    "KV_PLAN_UNSUPPORTED",
    /DRAM/,
  ],
  [
    "DCP sizes that do not divide",
    () => buildEngineTransferPlan(samplePair(sampleRank({ dcpSize: 2 }), sampleRank({ dcpSize: 3 }))),
    "KV_PLAN_INCOMPATIBLE",
    /local 2, remote 3/,
  ],
  [
    "a rank that the mapping does not ask for",
    () =>
      buildEngineTransferPlan(samplePair(sampleRank({ tpSize: 2 }), sampleRank({ tpSize: 2, tpRank: 1 }))),
    "KV_PLAN_INCOMPATIBLE",
    /remote rank 1/,
  ],
  [
    "a rank that is missing",
    () => buildEngineTransferPlan(samplePair(sampleRank(), sampleRank({ tpSize: 2 }))),
    "KV_PLAN_INVALID",
    /reads from remote ranks 0, 1; the geometry of 1 is missing/,
  ],
  [
    "ranks of one engine that differ",
    () =>
      buildEngineTransferPlan({
        ...samplePair(),
        remotes: [sampleRank({ tpSize: 2 }), sampleRank({ tpSize: 2, tpRank: 1, kernelBlockSize: 8 })],
      }),
    "KV_PLAN_INVALID",
    /differ in kernelBlockSize: 16 and 8/,
  ],
  [
    "no remote rank at all",
    () => buildEngineTransferPlan({ ...samplePair(), remotes: [] }),
    "KV_PLAN_INVALID",
    /at least one remote rank/,
  ],
])("refuses %s, with both values", (_what, attempt, code, message) => {
  expect(attempt).toThrow(message);
  try {
    attempt();
  } catch (error) {
    expect(KvError.is(error) && error.code).toBe(code);
  }
});

test("says which form a transfer has", () => {
  const form = (blockSize: number, tpSize: number) =>
    buildEngineTransferPlan(
      samplePair(sampleRank({ kernelBlockSize: blockSize, tpSize }), sampleRank({ tpSize })),
    ).form;
  expect([form(16, 1), form(32, 1), form(32, 4)]).toEqual(["copy", "permute", "copy"]);
});

test("a backend with an order of its own: bytes are moved as they are, and nothing is zeroed", () => {
  const rank = sampleRank({ attentionBackend: "CPU_ATTN" });
  expect(buildEngineTransferPlan(samplePair(rank, rank))).toMatchObject({
    form: "copy",
    uncovered: "masked",
    blockOrder: "opaque",
  });
});

test("an engine that masks uncovered tokens has no pass over blocks that lie right", () => {
  const plan = buildEngineTransferPlan({ ...samplePair(), masksUncovered: true });
  expect(plan.uncovered).toBe("masked");
  expect(
    planRequest(plan, { localBlockIds: [[1]], remoteBlockIds: [[1]], numTokens: 3 }).receivePass,
  ).toBeUndefined();
});

test("tables are made once, and do not grow with the number of blocks", () => {
  const rows = (numBlocks: number, padding: number) => {
    const grown = (rank: ReturnType<typeof sampleRank>) => ({
      ...rank,
      regions: rank.regions.map((one) => ({
        ...one,
        numBlocks,
        blockStrideBytes: one.blockStrideBytes + padding,
      })),
    });
    const [source] = buildEngineTransferPlan(
      samplePair(grown(sampleRank({ kernelBlockSize: 32 })), grown(sampleRank())),
    ).sources;
    expect(source?.localTable).toBe(source?.localTable);
    return [source?.localTable.rows.length, source?.remoteTable.rows.length];
  };
  expect(rows(10, 0)).toEqual([2 * 5, 2 * 5]);
  expect(rows(10_000, 0)).toEqual(rows(10, 0));
  expect(rows(10_000, 64)).toEqual([2 * 2 * 5, 2 * 5]);
});

test("sources that fill the same part of the local blocks share a list key, others do not", () => {
  const keys = (remoteTp: number) =>
    buildEngineTransferPlan({
      ...samplePair(),
      remotes: Array.from({ length: remoteTp }, (_, tpRank) => sampleRank({ tpRank, tpSize: remoteTp })),
    }).sources.map((source) => source.localListKey);
  expect(new Set(keys(2)).size).toBe(2);
  expect(keys(1)).toEqual(["parts=1 share=0/1"]);
});
