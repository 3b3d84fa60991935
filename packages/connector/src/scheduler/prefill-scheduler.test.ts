import type { BlockIds, ConnectorRequest, KvTransferParams } from "@kv/interface";
import { blocksDigest, parseTransferParams, promptContent, promptDigest } from "@kv/protocol";
import { manualClock } from "@kv/testing/manual-clock";
import { simConfig } from "@kv/testing/simulator/sim-options";
import { describe, expect, it } from "vitest";
import { PrefillScheduler } from "./prefill-scheduler.js";

function setUp(given: { unattendedLeaseMs?: number; isLayerwise?: boolean } = {}) {
  const clock = manualClock(50_000);
  const prefill = new PrefillScheduler({
    transferMode: "pull",
    clock,
    config: simConfig(16),
    engineId: "fce3b3a4",
    tpSize: 2,
    dcpSize: 1,
    ppSize: 1,
    leaseMs: 30_000,
    decoderBlocksTtlMs: 480_000,
    ...given,
    incarnation: "this-process",
    address: () => ({ host: "127.0.0.1", port: 5600, registrationGeneration: 1 }),
  });
  return { clock, prefill };
}
const request = (requestId: string, numPromptTokens = 100) => ({
  requestId,
  numPromptTokens,
  promptTokenIds: Array.from({ length: numPromptTokens }, (_, token) => token),
  kvTransferParams: { do_remote_decode: true },
});
const promptPrefix = (given: ConnectorRequest, numTokens: number) => {
  const content = promptContent(given);
  const digest = content && promptDigest(content, numTokens);
  return digest === undefined ? undefined : { numTokens, digest };
};
/** The first tokens of that prompt. */
const promptOf = (numTokens: number) => promptPrefix(request("any"), numTokens);
const queryOf = (params: KvTransferParams | undefined) => {
  const parsed = parseTransferParams(params);
  if (parsed.kind !== "remote-prefill") throw new Error("no parameters");
  const { remoteRequestId: requestId, remoteBlockIds, remoteNumTokens, lease } = parsed;
  return {
    requestId,
    generation: lease?.generation,
    capability: lease?.capability,
    blocks: blocksDigest(remoteBlockIds, remoteNumTokens) as string | undefined,
    prompt: promptOf(100),
  };
};
const blocks = (count: number) => [Array.from({ length: count }, (_, i) => i + 1)];

describe("prefill scheduler", () => {
  it("returns vLLM's kv_transfer_params, with the lease's end on its own clock, and the kv_peer extension", () => {
    const { prefill } = setUp();
    prefill.admitted(request("cmpl-1"), blocks(7));
    const finished = prefill.finished(request("cmpl-1"), blocks(7), "length");
    // vLLM 0.33's response for a prompt of 100 tokens, except for the expiry time, which vLLM's P
    // leaves null.
    expect(finished).toEqual({
      keepBlocks: true,
      kvTransferParams: {
        do_remote_prefill: true,
        do_remote_decode: false,
        remote_block_ids: [[1, 2, 3, 4, 5, 6, 7]],
        remote_engine_id: "fce3b3a4",
        remote_request_id: "cmpl-1",
        remote_host: "127.0.0.1",
        remote_port: 5600,
        tp_size: 2,
        dcp_size: 1,
        pp_size: 1,
        remote_num_tokens: 100,
        remote_blocks_expiry_time: 80,
        remote_registration_generation: 1,
        transfer_mode: "pull",
        kv_peer: {
          incarnation: "this-process",
          generation: 1,
          capability: expect.stringMatching(/^[\w-]{22}$/),
        },
      },
    });
    const step = prefill.takeStep();
    expect(step.inBatch.map(({ requestId }) => requestId)).toEqual(["cmpl-1"]);
    expect(step.leases).toMatchObject([
      {
        requestId: "cmpl-1",
        wireId: "cmpl-1",
        blockIds: blocks(7),
        expiresAtMs: 80_000,
        unattendedExpiresAtMs: 80_000,
      },
    ]);
    expect(prefill.hasStep).toBe(false);
  });

  it("offers only the blocks of the prompt", () => {
    const { prefill } = setUp();
    const params = prefill.finished(request("r", 32), blocks(4), "stopped").kvTransferParams;
    expect(params?.remote_block_ids).toEqual([[1, 2]]);
  });

  it("keeps no blocks of a request that was aborted, failed or has no blocks", () => {
    const { prefill } = setUp();
    for (const reason of ["aborted", "error"] as const) {
      prefill.admitted(request(reason), blocks(2));
      expect(prefill.finished(request(reason), blocks(2), reason)).toEqual({ keepBlocks: false });
    }
    expect(prefill.finished(request("empty"), [[]], "length")).toEqual({ keepBlocks: false });
    expect(prefill.takeStep()).toMatchObject({
      notSent: ["aborted", "error", "empty"],
      leases: [],
    });
    expect([prefill.running, prefill.leases]).toEqual([0, 0]);
  });

  it("keeps the blocks of an aborted request that layer-wise writes may read, until the workers report it", () => {
    const { prefill } = setUp({ isLayerwise: true });
    prefill.admitted(request("r"), blocks(2));
    expect(prefill.finished(request("r"), [], "aborted")).toEqual({ keepBlocks: true });
    expect(prefill.takeStep()).toMatchObject({ notSent: ["r"], leases: [] });
    prefill.sent("r");
    expect([prefill.running, prefill.leases]).toEqual([0, 0]);
    expect(prefill.finished(request("unknown"), [], "aborted")).toEqual({ keepBlocks: false });
  });

  it("holds blocks until they are sent, as the parameters name them, for those who have the parameters", () => {
    const { prefill } = setUp();
    prefill.admitted(request("r"), blocks(2));
    const paramsOf = (id: string, own: BlockIds) =>
      queryOf(prefill.finished(request(id), own, "length").kvTransferParams);
    const [query, victim] = [paramsOf("r", blocks(2)), paramsOf("s", [[7, 8]])];
    expect(prefill.holds(query)).toEqual({ held: true, prompt: "same" });
    for (const change of [
      { generation: undefined },
      { generation: 2 },
      { requestId: "other" },
      { blocks: victim.blocks },
      { blocks: blocksDigest(blocks(2), 17) },
      { blocks: undefined },
      { capability: victim.capability },
      { capability: undefined },
    ])
      expect(prefill.holds({ ...query, ...change }), JSON.stringify(change)).toEqual({
        held: false,
      });
    for (let at = 0; at < 2; at++) prefill.sent("r");
    expect([prefill.holds(query), prefill.leases]).toEqual([{ held: false }, 1]);
  });

  it("holds the blocks of the prompt that it computed, at any length, and of no other", () => {
    const { prefill } = setUp();
    const params = prefill.finished(
      { ...request("r"), contentKey: "lora a" },
      blocks(7),
      "length",
    ).kvTransferParams;
    const query = queryOf(params);
    const of = (promptTokenIds: readonly number[], contentKey?: string) =>
      prefill.holds({
        ...query,
        prompt: promptPrefix(
          { ...request("d"), promptTokenIds, contentKey },
          promptTokenIds.length,
        ),
      }).prompt;
    const tokens = request("r").promptTokenIds;
    for (const numTokens of [1, 64, 99, 100]) {
      expect(of(tokens.slice(0, numTokens), "lora a")).toBe("same");
      expect(of([...tokens.slice(0, numTokens - 1), 7000], "lora a")).toBe("differs");
      expect(of(tokens.slice(0, numTokens), "lora b")).toBe("differs");
      expect(of(tokens.slice(0, numTokens))).toBe("differs");
    }
    expect(of([...tokens, 100], "lora a")).toBe("differs");
    expect(prefill.holds({ ...query, prompt: undefined })).toEqual({
      held: false,
      prompt: "differs",
    });
    const unknown = prefill.finished(
      { ...request("s"), promptTokenIds: undefined },
      blocks(7),
      "length",
    );
    expect(prefill.holds(queryOf(unknown.kvTransferParams))).toEqual({
      held: false,
      prompt: "unknown",
    });
  });

  it("gives the second use of a request id a new wire id, so that late notifications for the first cannot end it", () => {
    const { prefill } = setUp();
    prefill.finished(request("r"), blocks(2), "length");
    prefill.sent("r");
    const again = prefill.finished(request("r"), blocks(2), "length").kvTransferParams;
    expect(again?.remote_request_id).not.toBe("r");
    const query = queryOf(again);
    expect(prefill.holds(query)).toEqual({ held: true, prompt: "same" });
    expect(prefill.holds({ ...query, requestId: "r" })).toEqual({ held: false });
  });

  it("announces the earlier of the lease deadline and the unattended deadline", () => {
    for (const [unattendedLeaseMs, announced] of [
      [120_000, 80],
      [10_000, 60],
    ] as const) {
      const { prefill } = setUp({ unattendedLeaseMs });
      const { kvTransferParams } = prefill.finished(request("r"), blocks(2), "length");
      expect(kvTransferParams?.remote_blocks_expiry_time).toBe(announced);
      expect(prefill.takeStep().leases[0]).toMatchObject({
        expiresAtMs: 80_000,
        unattendedExpiresAtMs: 50_000 + unattendedLeaseMs,
      });
    }
  });

  it("reports requests whose caches are gone once, also when the engine sleeps twice between two steps", () => {
    const { prefill } = setUp();
    prefill.finished(request("r"), blocks(2), "length");
    prefill.cachesLost();
    prefill.cachesLost();
    expect(prefill.takeStep()).toEqual({ inBatch: [], notSent: [], leases: [], lost: ["r"] });
  });

  it("admits a preempted request again with other blocks and the same wire id", () => {
    const { prefill } = setUp();
    prefill.admitted(request("r"), blocks(1));
    prefill.admitted(request("r"), [[8, 9]]);
    expect(prefill.takeStep().inBatch).toMatchObject([
      { requestId: "r", wireId: "r", blockIds: blocks(1) },
      { requestId: "r", wireId: "r", blockIds: [[8, 9]] },
    ]);
    expect(prefill.running).toBe(1);
  });
});
