import { describe, expect, test } from "vitest";
import { buildEngineTransferPlan, type EngineTransferPlan } from "../engine/engine-plan.js";
import type { SourcePlan } from "../engine/source-plans.js";
import type { RankGeometry } from "../geometry/rank-geometry.js";
import type { RequestBlocks } from "../request/request-blocks.js";
import { planRequest, type RequestPlan } from "../request/request-plan.js";
import { samplePlan, sampleRank, withRegions } from "../sample-pair.test-support.js";
import type { PlanFault } from "./proof-result.js";
import { proveEnginePlans, provePlan } from "./prove-plan.js";
import { sampleRequests } from "./sample-requests.js";

const remotes = [0, 1].map((tpRank) => sampleRank({ tpRank, tpSize: 2 }));
const wider = sampleRank({ kernelBlockSize: 32 });
const plan = samplePlan(wider, {}, { remotes });
const blocks: RequestBlocks = {
  localBlockIds: [[4, 2]],
  remoteBlockIds: [[7, 1, 3]],
  numTokens: 40,
};
const request = planRequest(plan, blocks);
const options = { remotes, numKvHeads: 4 };

function faultOf(changed: {
  plan?: EngineTransferPlan;
  request?: RequestPlan;
  blocks?: RequestBlocks;
}): PlanFault {
  const verdict = provePlan(changed.plan ?? plan, {
    ...options,
    requests: [{ blocks: changed.blocks ?? blocks, plan: changed.request ?? request }],
  });
  return verdict.proven ? expect.fail("it was proven") : verdict.fault;
}

test("a sound plan is proven, with the number of checked descriptors, requests and blocks", () => {
  const verdict = provePlan(plan, { ...options, requests: [{ blocks, plan: request }] });
  if (!verdict.proven) return expect.fail(verdict.fault.message);
  // Two regions of 10 blocks: two sources, each with 20 local parts and 10 remote blocks of either
  // region.
  expect(verdict.extent).toEqual({
    descriptors: 2 * (2 * 20 + 2 * 10),
    requests: 1,
    blocks: 4,
    patterns: 2,
  });
  expect(verdict.assumed).toEqual([]);
  expect(verdict.statements.length).toBeGreaterThan(3);
});

test("refuses a proof when the caches have fewer blocks than groups", () => {
  const proof = (numBlocks: number) => {
    const rank = withRegions(sampleRank(), () => ({ numBlocks }));
    const groups = ["full", "full"];
    return provePlan(samplePlan(rank, rank, { groups }), { remotes: [rank], numKvHeads: 4 });
  };
  expect(proof(2)).toMatchObject({ proven: true });
  expect(() => proof(1)).toThrow(
    "no request fits into caches of 1 and 1 logical blocks: each of 2 groups needs one",
  );
});

test("lists the engine's own conversions as assumed", () => {
  const repacked = samplePlan(
    { attentionBackend: "CPU_ATTN" },
    { attentionBackend: "PLAIN" },
    { conversions: ["attention-order"] },
  );
  const verdict = provePlan(repacked, {
    remotes: [sampleRank({ attentionBackend: "PLAIN" })],
    numKvHeads: 4,
  });
  expect(verdict).toMatchObject({ proven: true });
  expect(verdict.proven && verdict.assumed.join()).toContain(
    "repacks the inside of a head from PLAIN to CPU_ATTN,the engine masks tokens",
  );
});

describe("reports the first fault and its place", () => {
  test("bytes from another head", () => {
    const [one, two] = plan.sources;
    if (one === undefined || two === undefined) return expect.fail("two sources were expected");
    const swapped = {
      ...plan,
      sources: [
        { ...two, remoteRank: 0 },
        { ...one, remoteRank: 1 },
      ],
    };
    expect(faultOf({ plan: swapped })).toMatchObject({ kind: "wrong-source" });
    const withLocal = (source: SourcePlan, other: SourcePlan): SourcePlan => ({
      ...source,
      lists: source.lists.map((list) => ({ ...list, localTable: other.localTable })),
    });
    const crossed = {
      ...plan,
      sources: [withLocal(one, two), withLocal(two, one)],
    };
    const fault = faultOf({ plan: crossed });
    expect(fault).toMatchObject({
      kind: "wrong-source",
      at: { region: "layer.0", block: 4, head: 0, tokenInBlock: 0 },
    });
    expect(fault.message).toMatch(/^head 0, token 0 .* comes from head 2, token 0/);
  });

  test("bytes from another layer's page of a packed row", () => {
    const local = sampleRank();
    const [first] = local.regions as [RankGeometry["regions"][number]];
    const { blockLengthBytes: lengthBytes } = first;
    const row = { blockLengthBytes: 2 * lengthBytes, blockStrideBytes: 2 * lengthBytes };
    const remote: RankGeometry = {
      ...local,
      regions: [{ ...first, ...row }],
      packedMembers: {
        "layer.0": { offsetBytes: 0, lengthBytes },
        "layer.1": { offsetBytes: lengthBytes, lengthBytes },
      },
    };
    const sound = samplePlan(local, remote);
    const proof = (given: EngineTransferPlan) =>
      provePlan(given, { remotes: [remote], numKvHeads: 4 });
    expect(proof(sound)).toMatchObject({ proven: true });
    const [source] = sound.sources as [SourcePlan];
    const lists = source.lists.map(({ localTable, remoteTable, ...list }) => {
      const rows = remoteTable.rows.slice();
      // The rows of the second layer begin where those of the first do.
      rows[5] = rows[0] as number;
      return { ...list, localTable, remoteTable: { ...remoteTable, rows } };
    });
    expect(proof({ ...sound, sources: [{ ...source, lists }] })).toMatchObject({
      fault: { kind: "wrong-source", at: { region: "layer.1", offset: 0 } },
    });
  });

  test("a receive pass over wrong blocks or groups", () => {
    const pass = request.receivePass?.groups[0];
    if (pass === undefined) return expect.fail("a pass was expected");
    for (const spoiled of [
      [{ ...pass, zeroBlockIds: Int32Array.of(9) }],
      [{ ...pass, permuteBlockIds: Int32Array.of(4, 2, 4) }],
      [pass, pass],
      [pass, { ...pass, group: 3 }],
    ]) {
      expect(faultOf({ request: { ...request, receivePass: { groups: spoiled } } })).toMatchObject({
        kind: "receive-pass",
      });
    }
  });

  test("a request with a repeated remote block", () => {
    expect(faultOf({ blocks: { ...blocks, remoteBlockIds: [[7, 7, 3]] } })).toMatchObject({
      kind: "request-tables",
    });
  });
});

test("proves a plan for TP 8 to 4, 80 layers and 100,000 blocks without any memory", () => {
  const engine = (tpSize: number) =>
    Array.from({ length: tpSize }, (_, tpRank): RankGeometry => {
      const lengthBytes = (8 / tpSize) * 16 * 512;
      const regions = Array.from({ length: 80 }, (__, layer) => ({
        name: `model.layers.${layer}`,
        baseAddress: 2 ** 40 + layer * 2 ** 33,
        numBlocks: 100_000,
        blockLengthBytes: lengthBytes,
        blockStrideBytes: lengthBytes,
        groupId: 0,
        memoryType: "VRAM" as const,
      }));
      return { ...sampleRank({ tpRank, tpSize }), regions };
    });
  const [prefill, decode] = [engine(8), engine(4)];
  const plans = decode.map((local) =>
    buildEngineTransferPlan({
      local,
      remotes: prefill.slice(2 * local.tpRank, 2 * local.tpRank + 2),
      numKvHeads: 8,
      groups: ["full"],
    }),
  );
  const verdict = proveEnginePlans(plans, { remotes: prefill, numKvHeads: 8 });
  expect(verdict).toMatchObject({ proven: true, extent: { descriptors: 4 * 4 * 80 * 100_000 } });
  // The samples reach the pool's last block.
  const reached = sampleRequests(plans[0] as EngineTransferPlan).flatMap(({ blocks: given }) =>
    given.remoteBlockIds.flat(),
  );
  expect(Math.max(...reached)).toBe(99_999);
  expect(Math.min(...reached)).toBe(0);
});
