import type { BlockIds, ConnectorRequest, KvCacheConfig } from "@kv/interface";
import { schedulerAlone } from "@kv/testing/scheduler-alone";
import { simConfig } from "@kv/testing/simulator/sim-options";
import { describe, expect, it } from "vitest";
import { createPullScheduler } from "../src/scheduler.js";
import type { PullStepMetadata } from "../src/step-metadata.js";

async function setUp(given: { cache?: KvCacheConfig; role?: string } = {}) {
  const alone = schedulerAlone(createPullScheduler, given);
  await alone.scheduler.setHandshakeMetadata([]);
  return alone;
}

const ids = (length: number) => Array.from({ length }, (_, id) => id);
const produced = (change: Partial<ConnectorRequest> = {}): ConnectorRequest => ({
  requestId: "r",
  numPromptTokens: 40,
  promptTokenIds: ids(40),
  kvTransferParams: { do_remote_decode: true },
  ...change,
});
const consumed = (change: Partial<ConnectorRequest> = {}, groups = 1): ConnectorRequest =>
  produced({
    kvTransferParams: {
      do_remote_prefill: true,
      remote_block_ids: Array.from({ length: groups }, () => [7, 8, 9]),
      remote_engine_id: "p",
      remote_request_id: "cmpl-p",
      remote_host: "p",
      remote_port: 5600,
      tp_size: 1,
      remote_num_tokens: 40,
      transfer_mode: "pull",
    },
    ...change,
  });
const BLOCKS = [[1, 2, 3]];
const NOTHING = { running: 0, leases: 0, requests: 0, heartbeats: 0 };

describe("H6: what an engine passes in is checked where it is passed", () => {
  it.each<[string, Partial<ConnectorRequest>, RegExp]>([
    ["a negative token id", { promptTokenIds: [...ids(39), -1] }, /token 39 .* the id -1/],
    ["more ids than tokens", { promptTokenIds: ids(41) }, /40 prompt tokens, .* ids of 41/],
    ["fewer ids than tokens", { promptTokenIds: ids(39) }, /40 prompt tokens, .* ids of 39/],
  ])("%s: refused before the prefill, and nothing is kept", async (_, change, message) => {
    for (const request of [produced(change), consumed(change)]) {
      const { scheduler: made } = await setUp();
      expect(() => made.matchedTokens(request, 0)).toThrow(message);
      expect(() => made.afterAllocation(request, BLOCKS, 0)).toThrow(message);
      expect(made.outstanding()).toMatchObject(NOTHING);
    }
  });

  it.each<[string, BlockIds, RegExp]>([
    ["another number of groups", [[1, 2, 3], [4]], /blocks of 2 KV cache groups, and has 1/],
    ["a block twice", [[1, 2, 2]], /block 2 twice in KV cache group 0/],
    ["a negative block", [[1, 2, -3]], /block -3 in KV cache group 0/],
  ])("%s: refused at the allocation, and at the end", async (_, blockIds, message) => {
    for (const request of [produced(), consumed()]) {
      const { scheduler: made } = await setUp();
      const { tokens } = made.matchedTokens(request, 0);
      expect(() => made.afterAllocation(request, blockIds, tokens)).toThrow(message);
    }
    const { scheduler: made } = await setUp();
    made.afterAllocation(produced(), BLOCKS, 0);
    expect(() => made.requestFinished(produced(), blockIds, "length")).toThrow(message);
    expect(made.outstanding()).toMatchObject(NOTHING);
    expect(made.buildStepMetadata()).toMatchObject({ leases: [], notSent: ["r"] });
  });

  it("fewer blocks than the prompt needs: nothing is offered, and the engine is told", async () => {
    const { scheduler: made } = await setUp();
    made.afterAllocation(produced(), [[1]], 0);
    expect(() => made.requestFinished(produced(), [[1, 2]], "length")).toThrow(
      /2 blocks of KV cache group 0, and 40 tokens need 3/,
    );
    expect(made.outstanding()).toMatchObject(NOTHING);
    // An aborted request has the blocks that it has.
    expect(made.requestFinished(produced(), [[1]], "aborted")).toEqual({ keepBlocks: false });
  });

  it("a refused request keeps nothing, whether or not its engine ends it", async () => {
    const { scheduler: made } = await setUp();
    const { kvTransferParams } = consumed();
    const refused = consumed({ kvTransferParams: { ...kvTransferParams, remote_port: 0 } });
    for (let time = 0; time < 2; time++) {
      expect(() => made.matchedTokens(refused, 0)).toThrow(/remote_port/);
      expect(made.outstanding()).toMatchObject(NOTHING);
    }
    made.requestFinished(refused, [[]], "error");
    expect(made.outstanding()).toMatchObject(NOTHING);
  });
});

it("H2: computed tokens by group that the allocation does not repeat are those that were matched", async () => {
  const one = simConfig(16);
  const cache = { ...one, groups: ["full", "full"].map((kind) => ({ kind, layerNames: [] })) };
  const ordered = async (...repeated: readonly (readonly number[])[]) => {
    const { scheduler: made } = await setUp({ cache });
    const request = consumed({}, 2);
    expect(made.matchedTokens(request, 16, [16, 0]).tokens).toBe(24);
    made.afterAllocation(
      request,
      [
        [1, 2, 3],
        [4, 5, 6],
      ],
      24,
      ...repeated,
    );
    const { receives } = made.buildStepMetadata() as PullStepMetadata;
    return receives[0]?.localBlockIds;
  };
  expect(await ordered()).toEqual([
    [2, 3],
    [4, 5, 6],
  ]);
  expect(await ordered([16, 0])).toEqual([
    [2, 3],
    [4, 5, 6],
  ]);
  expect(await ordered([0, 0])).toEqual([
    [1, 2, 3],
    [4, 5, 6],
  ]);
  await expect(ordered([16, 16])).rejects.toThrow(/16 computed tokens in KV cache group 1, and 0/);
});

it("S2.6: kv_role decides nothing, and a request that contradicts it is said once", async () => {
  for (const [role, contradicted] of [
    ["kv_producer", ["d"]],
    ["kv_consumer", ["p"]],
    ["kv_both", []],
  ] as const) {
    const { scheduler: made, warned } = await setUp({ role });
    for (const id of ["", " again"]) {
      expect(made.matchedTokens(produced({ requestId: `p${id}` }), 0).tokens).toBe(0);
      const { kvTransferParams } = consumed();
      const own = { ...kvTransferParams, remote_request_id: `cmpl-p${id}` };
      const request = consumed({ requestId: `d${id}`, kvTransferParams: own });
      expect(made.matchedTokens(request, 0).tokens).toBe(40);
    }
    const said = warned.filter(([event]) => event === "role-contradicted");
    expect(said.map(([, fields]) => fields?.["requestId"])).toEqual(contradicted);
  }
});
