import { describe, expect, test } from "vitest";
import { buildEngineTransferPlan, type EngineTransferPlan } from "../engine/engine-plan.js";
import type { SourcePlan } from "../engine/source-plans.js";
import type { RankGeometry } from "../geometry/rank-geometry.js";
import type { RequestBlocks } from "../request/request-checks.js";
import { planRequest, type RequestPlan } from "../request/request-plan.js";
import { samplePair, samplePlan, sampleRank } from "../sample-pair.test-support.js";
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

/** A read whose runs are rebuilt from its ids. */
const withIds = (read: RequestPlan["reads"][number]) => ({
  ...read,
  runs: Int32Array.from([...read.localIds].flatMap((id, at) => [id, read.remoteIds[at] ?? -1, 1])),
});
const withReads = (
  change: (read: RequestPlan["reads"][number]) => Partial<RequestPlan["reads"][number]>,
): RequestPlan => ({
  ...request,
  reads: request.reads.map((read, index) =>
    index === 0 ? withIds({ ...read, ...change(read) }) : read,
  ),
});

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
  const base = sampleRank();
  const of = (numBlocks: number) =>
    sampleRank({ regions: base.regions.map((each) => ({ ...each, numBlocks })) });
  const proof = (numBlocks: number) => {
    const pair = samplePair(of(numBlocks), of(numBlocks), ["full", "full"]);
    return provePlan(buildEngineTransferPlan(pair), { remotes: [of(numBlocks)], numKvHeads: 4 });
  };
  expect(proof(2)).toMatchObject({ proven: true });
  expect(() => proof(1)).toThrow(
    /no request fits into caches of 1 and 1 logical blocks: each of 2 groups needs one/,
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
  expect(verdict.proven && verdict.assumed.join()).toMatch(
    /repacks .* PLAIN to CPU_ATTN.*masks tokens/,
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

  test("a byte that is not written or written twice", () => {
    const fewer = withReads((read) => ({
      localIds: read.localIds.slice(1),
      remoteIds: read.remoteIds.slice(1),
    }));
    expect(faultOf({ request: fewer })).toMatchObject({
      kind: "not-written",
      at: { region: "layer.0" },
    });
    const twice = withReads((read) => ({
      localIds: Int32Array.of(...read.localIds, read.localIds[0] ?? 0),
      remoteIds: Int32Array.of(...read.remoteIds, read.remoteIds[0] ?? 0),
    }));
    expect(faultOf({ request: twice })).toMatchObject({ kind: "written-twice" });
  });

  test("local or remote blocks of another request", () => {
    const foreign = withReads((read) => ({
      localIds: read.localIds.map((id, at) => (at === 0 ? 0 : id)),
    }));
    expect(faultOf({ request: foreign })).toMatchObject({
      kind: "foreign-write",
      at: { block: 0 },
    });
    const stolen = withReads((read) => ({
      remoteIds: read.remoteIds.map((id, at) => (at === 0 ? 0 : id)),
    }));
    expect(faultOf({ request: stolen })).toMatchObject({
      kind: "wrong-source",
      at: { remoteBlock: 0 },
    });
    const beyond = withReads((read) => ({
      remoteIds: read.remoteIds.map((id, at) => (at === 0 ? 999 : id)),
    }));
    expect(faultOf({ request: beyond })).toMatchObject({
      kind: "descriptor-outside",
      at: { id: 999 },
    });
  });

  test("a tail that is not cleared, or cleared too far", () => {
    const pass = request.receivePass?.groups[0];
    if (pass?.partialBlock === undefined) return expect.fail("a partial block was expected");
    const { partialBlock, ...kept } = pass;
    expect(faultOf({ request: { ...request, receivePass: { groups: [kept] } } })).toMatchObject({
      kind: "tail-not-cleared",
      at: { block: 2, tokenInBlock: 8 },
    });
    const early = { ...pass, partialBlock: { ...partialBlock, fromToken: 7 } };
    expect(faultOf({ request: { ...request, receivePass: { groups: [early] } } })).toMatchObject({
      kind: "needed-but-cleared",
      at: { block: 2, tokenInBlock: 7 },
    });
    const masked = { ...plan, uncovered: "masked" as const };
    expect(
      provePlan(masked, {
        ...options,
        requests: [{ blocks, plan: { ...request, receivePass: { groups: [kept] } } }],
      }),
    ).toMatchObject({
      proven: true,
    });
  });

  test("tokens before a window that are not cleared, or cleared too far", () => {
    const swa = samplePlan(wider, {}, { groups: ["swa"] });
    const tables = { localBlockIds: [[4, 2]], remoteBlockIds: [[1, 3, 5]], numTokens: 64 };
    const sound = planRequest(swa, tables);
    const [pass] = sound.receivePass?.groups ?? [];
    if (pass?.leadingBlock === undefined) return expect.fail("a leading block was expected");
    const { leadingBlock, ...kept } = pass;
    const verdict = (plan: EngineTransferPlan, group: typeof pass) => {
      const requests = [{ blocks: tables, plan: { ...sound, receivePass: { groups: [group] } } }];
      return provePlan(plan, { remotes: [sampleRank()], numKvHeads: 4, requests });
    };
    expect(verdict(swa, pass)).toMatchObject({ proven: true });
    expect(verdict(swa, kept)).toMatchObject({
      fault: { kind: "lead-not-cleared", at: { block: 4, tokenInBlock: 0 } },
    });
    const far = { ...kept, leadingBlock: { ...leadingBlock, untilToken: 17 } };
    expect(verdict(swa, far)).toMatchObject({
      fault: { kind: "needed-but-cleared", at: { block: 4, tokenInBlock: 16 } },
    });
    expect(verdict({ ...swa, uncovered: "masked" }, kept)).toMatchObject({ proven: true });
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

  test("a table row with a wrong stride, also outside the request's blocks", () => {
    const [one, two] = plan.sources;
    if (one === undefined || two === undefined) return expect.fail("two sources were expected");
    const rows = one.remoteTable.rows.slice();
    rows[8] = (rows[8] ?? 0) + 8;
    const lists = one.lists.map((list) => ({
      ...list,
      remoteTable: { ...list.remoteTable, rows },
    }));
    const stepped = { ...plan, sources: [{ ...one, lists }, two] };
    expect(faultOf({ plan: stepped })).toMatchObject({
      kind: expect.stringMatching(/^descriptor-/),
    });
  });

  test("a request with a repeated remote block", () => {
    expect(faultOf({ blocks: { ...blocks, remoteBlockIds: [[7, 7, 3]] } })).toMatchObject({
      kind: "request-tables",
    });
  });
});

describe("notifications, over all local ranks", () => {
  const small = [0, 1, 2, 3].map((tpRank) => sampleRank({ tpRank, tpSize: 4 }));
  const plans = small.map((local) =>
    samplePlan(local, {}, { remotes: [remotes[local.tpRank >> 1] as RankGeometry] }),
  );
  const asked: RequestBlocks = { localBlockIds: [[1]], remoteBlockIds: [[2]], numTokens: 16 };
  const requests = plans.map((one) => planRequest(one, asked));
  const verdictOf = (changed: readonly RequestPlan[], given = plans) =>
    proveEnginePlans(given, { ...options, requests: [{ blocks: asked, plans: changed }] });
  const kindOf = (changed: readonly RequestPlan[], given = plans) => {
    const verdict = verdictOf(changed, given);
    return verdict.proven ? "proven" : verdict.fault.kind;
  };
  const first = requests[0] as RequestPlan;

  test("each remote rank gets the notifications that it waits for", () => {
    expect(verdictOf(requests)).toMatchObject({ proven: true });
  });

  test("reports a missing, wrong, stray or repeated notification", () => {
    expect(kindOf([{ ...first, notify: [{ tpRank: 1, ppRank: 0 }] }, ...requests.slice(1)])).toBe(
      "notification-count",
    );
    expect(kindOf([{ ...first, notify: [{ tpRank: 5, ppRank: 0 }] }, ...requests.slice(1)])).toBe(
      "notification-stray",
    );
    expect(kindOf([{ ...first, notify: [{ tpRank: 0, ppRank: 0 }] }, ...requests.slice(1)])).toBe(
      "notification-twice",
    );
    expect(kindOf(requests.slice(0, 3), plans.slice(0, 3))).toBe("notification-missing");
    expect(kindOf(requests.slice(0, 2), plans.slice(0, 2))).toBe("notification-missing");
  });

  test("reports consumer counts that disagree", () => {
    const other = plans.map((one, index) => (index === 3 ? { ...one, localConsumers: 1 } : one));
    expect(kindOf(requests, other)).toBe("notification-count");
    expect(
      kindOf(
        requests,
        plans.map((one) => ({ ...one, localConsumers: 3 })),
      ),
    ).toBe("notification-missing");
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
