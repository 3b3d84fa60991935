import {
  type ConnectorRequest,
  type KvCacheConfig,
  KvError,
  type KvTransferParams,
} from "@kv/interface";
import { schedulerAlone } from "@kv/testing/scheduler-alone";
import { simConfig } from "@kv/testing/simulator/sim-options";
import { describe, expect, it } from "vitest";
import { createPullScheduler } from "./scheduler.js";
import type { PullStepMetadata } from "./step-metadata.js";

const PARAMS: KvTransferParams = {
  do_remote_prefill: true,
  do_remote_decode: false,
  remote_block_ids: [[11, 12, 13, 14, 15, 16, 17]],
  remote_engine_id: "p-engine",
  remote_request_id: "cmpl-p",
  remote_host: "prefill",
  remote_port: 5600,
  tp_size: 2,
  dcp_size: 1,
  pp_size: 1,
  remote_num_tokens: 100,
  remote_blocks_expiry_time: null,
  remote_registration_generation: 1,
  transfer_mode: "pull",
  remote_prefill_cached_tokens: 0,
};

const setUp = (given: Parameters<typeof schedulerAlone>[1] = {}) =>
  schedulerAlone(createPullScheduler, given);
type Scheduler = ReturnType<typeof setUp>["scheduler"];

const request = (
  requestId: string,
  kvTransferParams: KvTransferParams = PARAMS,
  numPromptTokens = 100,
): ConnectorRequest => ({ requestId, numPromptTokens, kvTransferParams });
const stepOf = (scheduler: Scheduler) => scheduler.buildStepMetadata() as PullStepMetadata;
const received = (scheduler: Scheduler, requestId: string) =>
  scheduler.applyWorkerOutput({
    finishedSending: [],
    finishedReceiving: [requestId],
    failedReceiving: [],
    failedBlockIds: [],
  });
const blocks = (count: number) => [Array.from({ length: count }, (_, i) => i + 1)];
const reads = (tokens: number) => ({ tokens, async: tokens > 0 });

/** Nothing is held, and nothing is to be said to the workers. */
function expectRest(scheduler: Scheduler) {
  const { requests, heartbeats } = scheduler.outstanding();
  expect([requests, heartbeats, scheduler.hasPendingWork()]).toEqual([0, 0, false]);
}

function expectForgotten(scheduler: Scheduler, ended: ConnectorRequest) {
  expect(scheduler.requestFinished(ended, blocks(7), "length")).toEqual({ keepBlocks: false });
  expectRest(scheduler);
}

describe("seed_first_token (vllm#51919)", () => {
  const extra = { seed_first_token: true };
  const seeded = { ...PARAMS, first_token_ids: [42] };
  const ofKv = { ...seeded, kv_peer: { incarnation: "p", generation: 1, sampling: "greedy" } };
  const asked = (
    params: KvTransferParams,
    more: Partial<ConnectorRequest> = {},
    on: object = extra,
  ) => {
    const { scheduler } = setUp({ extra: { ...on } });
    return scheduler.firstToken({ ...request("d", params), samplingKey: "greedy", ...more });
  };

  it("D takes the token of a vLLM P, and of one of @kv that has sampled as D would, and no other", () => {
    expect([asked(seeded), asked(ofKv)]).toEqual([42, 42]);
    const others = [
      asked(PARAMS),
      asked({ ...seeded, first_token_ids: null }),
      // Log probabilities are asked for, or P has sampled otherwise, or does not say how.
      asked(ofKv, { samplingKey: undefined }),
      asked(ofKv, { samplingKey: "[1,1,0,7]" }),
      asked({ ...ofKv, kv_peer: { incarnation: "p", generation: 1 } }),
      // P has sampled after another prompt.
      asked({ ...ofKv, remote_num_tokens: 99 }),
      asked({ ...ofKv, remote_num_tokens: null }),
      // A P that reads the last turn back, and one without the setting.
      asked({ ...ofKv, do_remote_prefill: false, do_remote_decode: true }),
      asked(ofKv, {}, {}),
    ];
    expect(others).toEqual(others.map(() => undefined));
  });

  it("refuses malformed first_token_ids by name, and only with the setting", () => {
    const malformed = { ...PARAMS, first_token_ids: [1, 2] };
    const on = setUp({ extra });
    expect(() => on.scheduler.matchedTokens(request("d", malformed), 0)).toThrow(
      /first_token_ids is a list of 2, not a list of one token id/,
    );
    const off = setUp();
    expect(off.scheduler.matchedTokens(request("d", malformed), 0)).toEqual(reads(100));
  });

  it.each([
    [
      "its one token, and how it was sampled",
      { extra, cache: simConfig(16), outputTokenIds: [42], found: [42] },
    ],
    ["none without the setting", { extra: {}, cache: simConfig(16), outputTokenIds: [42] }],
    ["none of several tokens", { extra, cache: simConfig(16), outputTokenIds: [42, 43] }],
    [
      "none where the engine does not say how it samples",
      { extra, cache: simConfig(16), outputTokenIds: [42], samplingKey: undefined },
    ],
    [
      "none after a shortened prompt: it is a token of the prompt",
      { extra, cache: { ...simConfig(16), prefillBackoffTokens: 3 }, outputTokenIds: [42] },
    ],
  ])("P passes on %s", async (_what, given) => {
    const { scheduler } = setUp(given);
    await scheduler.setHandshakeMetadata([]);
    const asked = request("p", { do_remote_decode: true });
    const numPromptTokens = scheduler.tokensToPrefill(asked);
    const produced = { ...asked, numPromptTokens };
    scheduler.afterAllocation(produced, blocks(7), 0);
    const { samplingKey } = { samplingKey: "greedy", ...given };
    const ended = { ...produced, outputTokenIds: given.outputTokenIds, samplingKey };
    const { kvTransferParams } = scheduler.requestFinished(ended, blocks(7), "length");
    expect(kvTransferParams?.["remote_num_tokens"]).toBe(numPromptTokens);
    expect(kvTransferParams?.["first_token_ids"]).toEqual(
      "found" in given ? given.found : undefined,
    );
    expect(JSON.stringify(kvTransferParams).includes('"sampling":"greedy"')).toBe("found" in given);
    await scheduler.close();
  });
});

describe("a cache whose last prompt tokens only the decode engine may compute (vllm#37310, vllm#53514)", () => {
  const states: KvCacheConfig = {
    ...simConfig(16),
    groups: [
      { kind: "full", layerNames: ["layers.0"] },
      { kind: "mamba", layerNames: ["layers.1"] },
    ],
  };
  const replayed: KvCacheConfig = { ...simConfig(16), prefillBackoffTokens: 3 };
  const told = (tokens: number | null, groups = 2): KvTransferParams => ({
    ...PARAMS,
    remote_num_tokens: tokens,
    remote_block_ids: [[11, 12, 13, 14, 15, 16, 17], [20]].slice(0, groups),
  });
  const refusal = (attempt: () => unknown) => {
    try {
      attempt();
    } catch (error) {
      if (KvError.is(error, "KV_PLAN_UNSUPPORTED")) return error.message;
      throw error;
    }
    return undefined;
  };
  const STATE = 'group 1 of the KV cache is "mamba", a state after the last token';

  it("takes the state of a prefill engine that has left the last token out, as vLLM's does", () => {
    const { scheduler } = setUp({ cache: states });
    expect(scheduler.matchedTokens(request("r", told(99)), 0)).toEqual(reads(99));
    scheduler.afterAllocation(request("r", told(99)), [...blocks(7), [8]], 99);
    expect(stepOf(scheduler).receives).toMatchObject([
      { remote: { numTokens: 99 }, localBlockIds: [[1, 2, 3, 4, 5, 6, 7], [8]] },
    ]);
  });

  it.each([
    ["has computed it", 100, "has computed 100"],
    ["does not say how many tokens it computes", null, "does not say how many it computes"],
  ])(
    "refuses the state of one that %s: the last token would be applied to it twice; its blocks are released",
    (_, tokens, said) => {
      const { scheduler } = setUp({ cache: states });
      expect(refusal(() => scheduler.matchedTokens(request("r", told(tokens)), 0))).toBe(
        `${STATE}: a prefill engine must leave the last 1 of 100 prompt tokens to this one, and it ${said} (remote_num_tokens)`,
      );
      expect(stepOf(scheduler)).toMatchObject({
        receives: [],
        releases: [{ requestId: "cmpl-p" }],
      });
      expectForgotten(scheduler, request("r", told(tokens)));
    },
  );

  it("computes a prompt of one token itself", () => {
    const { scheduler } = setUp({ cache: states });
    const one = { ...told(1), remote_block_ids: [[11], [20]] };
    expect(scheduler.matchedTokens(request("r", one, 1), 0)).toEqual(reads(0));
  });

  it("takes nothing where a prefix hit leaves only the tokens that it computes itself", () => {
    const { scheduler } = setUp({ cache: replayed });
    expect(scheduler.matchedTokens(request("r", told(97, 1)), 96)).toEqual(reads(1));
    expect(scheduler.matchedTokens(request("r", told(97, 1)), 97)).toEqual(reads(0));
    expect(
      refusal(() =>
        scheduler.matchedTokens(request("s", { ...told(98, 1), remote_request_id: "other" }), 0),
      ),
    ).toMatch(
      /prefillBackoffTokens of the KV cache is 3: a prefill engine must leave the last 3 of 100 prompt tokens to this one, and it has computed 98/,
    );
  });

  it("prefills for a decode engine that computes the last token itself, where its own engine leaves it out", () => {
    const { scheduler } = setUp({ cache: states });
    const produced = request("p", { do_remote_decode: true, do_remote_prefill: false });
    expect(scheduler.tokensToPrefill(produced)).toBe(99);
    const shortened = { ...produced, numPromptTokens: 99 };
    expect(scheduler.matchedTokens(shortened, 0)).toEqual(reads(0));
    scheduler.afterAllocation(shortened, [...blocks(7), [8]], 0);
    // Of requests that no peer takes part in, nothing is left out, and of no more tokens than are
    // left out neither.
    expect(scheduler.tokensToPrefill(request("own", {}))).toBe(100);
    expect(scheduler.tokensToPrefill(request("one", { do_remote_decode: true }, 1))).toBe(1);
  });

  it("does not prefill for a decode engine where its own engine computes all tokens", () => {
    const { scheduler } = setUp({ cache: states });
    const produced = request("p", { do_remote_decode: true, do_remote_prefill: false });
    const message = `${STATE}: a prefill engine must leave the last 1 tokens of a prompt to the decode engine, and this one computes all of them`;
    expect(refusal(() => scheduler.matchedTokens(produced, 0))).toBe(message);
    expect(refusal(() => scheduler.afterAllocation(produced, [...blocks(7), [8]], 0))).toBe(
      message,
    );
    expect(scheduler.tokensToPrefill(produced)).toBe(99);
    expect(refusal(() => scheduler.matchedTokens(produced, 0))).toMatch(/computes 100, not 99/);
    expectRest(scheduler);
    // Requests that no peer takes part in are none of its business.
    expect(scheduler.matchedTokens(request("own", {}), 0)).toEqual(reads(0));
  });

  it("reads a state back only where a token is left to compute after it, and else computes and releases it", () => {
    const extra = { bidirectional_kv_xfer: true, kv_recompute_threshold: 0 };
    const back = {
      ...told(97),
      do_remote_prefill: false,
      do_remote_decode: true,
      remote_blocks_expiry_time: 99,
    };
    const asks = (numTokens: number) => {
      const { scheduler } = setUp({ cache: states, extra });
      const left = scheduler.tokensToPrefill(request("r", back, numTokens));
      const matched = scheduler.matchedTokens(request("r", back, left), 0);
      scheduler.afterAllocation(request("r", back, left), [...blocks(7), [8]], matched.tokens);
      const { receives, releases } = stepOf(scheduler);
      return [left, matched.tokens, receives.length, releases.length];
    };
    expect(asks(100)).toEqual([99, 97, 1, 0]);
    expect(asks(99)).toEqual([98, 97, 1, 0]);
    // The state has the last token that P computes: it would be applied to it twice.
    expect(asks(98)).toEqual([97, 0, 0, 1]);
  });

  it("warns that D keeps nothing where its engine does not count, and not of a request that was refused", () => {
    const { scheduler, warned } = setUp({ extra: { bidirectional_kv_xfer: true } });
    scheduler.requestFinished(request("refused"), blocks(7), "aborted");
    expect(warned).toEqual([]);
    scheduler.requestFinished(request("whole"), blocks(7), "length");
    expect(warned.map(([event]) => event)).toEqual(["readback-not-offered"]);
  });

  it("warns of a readback that it does not do, and of KV in its cache that nobody has compared", () => {
    const { scheduler, warned } = setUp({ extra: { cache_unverified_kv: true } });
    const back = { ...PARAMS, do_remote_prefill: false, do_remote_decode: true };
    scheduler.requestQueued(request("r", back));
    scheduler.requestQueued(request("own", {}));
    expect(warned.map(([event]) => event)).toEqual([
      "unverified-kv-is-cached",
      "readback-not-enabled",
    ]);
  });

  it("an engine with pipeline stages is refused bidirectional_kv_xfer: it cannot read", () => {
    expect(() => setUp({ extra: { bidirectional_kv_xfer: true }, ppSize: 2 })).toThrow(
      /bidirectional_kv_xfer is true, and this engine has 2 pipeline stages/,
    );
  });

  it("a number that is none is refused when the scheduler is created", () => {
    expect(() => setUp({ cache: { ...replayed, prefillBackoffTokens: 0.5 } })).toThrow(
      /prefillBackoffTokens is 0.5, expected 0 or more/,
    );
  });
});

describe("decode scheduler", () => {
  it("reads the whole prompt from P once, and sends heartbeats until it is received", () => {
    const { scheduler, clock } = setUp();
    scheduler.requestQueued(request("r"));
    expect(stepOf(scheduler)).toMatchObject({
      receives: [],
      heartbeats: [
        {
          engineId: "p-engine",
          host: "prefill",
          port: 5600,
          tpSize: 2,
          begin: [{ requestId: "cmpl-p" }],
        },
      ],
    });
    clock.advance(500);
    expect(scheduler.matchedTokens(request("r"), 0)).toEqual(reads(100));
    scheduler.afterAllocation(request("r"), blocks(7), 100);
    const { receives, heartbeats } = stepOf(scheduler);
    expect(heartbeats).toEqual([]);
    expect(receives).toMatchObject([
      {
        requestId: "r",
        localBlockIds: blocks(7),
        localComputedBlocks: [0],
        seenAtMs: 1000,
        remote: { requestId: "cmpl-p", numTokens: 100, blockIds: [[11, 12, 13, 14, 15, 16, 17]] },
      },
    ]);
    // A request that is admitted again after a preemption reads nothing more.
    expect(scheduler.matchedTokens(request("r"), 0)).toEqual(reads(0));
    received(scheduler, "r");
    expect(stepOf(scheduler)).toMatchObject({
      releases: [{ requestId: "cmpl-p" }],
      heartbeats: [{ begin: [], end: [{ requestId: "cmpl-p" }] }],
    });
    expectForgotten(scheduler, request("r"));
  });

  it("reads at most the tokens that P holds; without their number the whole prompt", () => {
    const { scheduler } = setUp();
    expect(
      scheduler.matchedTokens(request("short", { ...PARAMS, remote_num_tokens: 40 }), 0).tokens,
    ).toBe(40);
    expect(
      scheduler.matchedTokens(request("silent", { ...PARAMS, remote_num_tokens: null }), 0).tokens,
    ).toBe(100);
  });

  it("refuses a placeholder prompt of 4 tokens for P's 42, with both numbers, and releases P's blocks", () => {
    const { scheduler } = setUp();
    // In blocks of 64 both prompts have one block.
    const params = { ...PARAMS, remote_block_ids: [[11]], remote_num_tokens: 42 };
    expect(() => scheduler.matchedTokens(request("r", params, 4), 0)).toThrow(
      expect.objectContaining({
        code: "KV_REQUEST_INVALID",
        message: expect.stringMatching(
          /remote_num_tokens is 42, and the prompt has 4 tokens/,
        ) as string,
      }) as Error,
    );
    expect(stepOf(scheduler).releases).toMatchObject([{ requestId: "cmpl-p" }]);
    const other = { ...params, remote_request_id: "cmpl-q" };
    expect(scheduler.matchedTokens(request("same", other, 42), 0).tokens).toBe(42);
  });

  it("refuses invalid parameters every time, and notifies P once if they contain its address", () => {
    const { scheduler } = setUp();
    const bad = request("r", { ...PARAMS, remote_block_ids: [[-1]] });
    scheduler.requestQueued(bad);
    for (let i = 0; i < 2; i++) {
      expect(() => scheduler.matchedTokens(bad, 0)).toThrow(
        expect.objectContaining({ code: "KV_REQUEST_INVALID" }) as Error,
      );
    }
    expect(stepOf(scheduler).releases).toMatchObject([{ requestId: "cmpl-p", port: 5600 }]);
    expectForgotten(scheduler, bad);

    const nowhere = request("n", { ...PARAMS, remote_host: null });
    expect(() => scheduler.matchedTokens(nowhere, 0)).toThrow();
    expect(stepOf(scheduler).releases).toEqual([]);
    const push = request("p", { ...PARAMS, transfer_mode: "push" });
    expect(() => scheduler.matchedTokens(push, 0)).toThrow(/push/);
    expect(stepOf(scheduler).releases).toEqual([]);
  });

  it.each([{}, { bidirectional_kv_xfer: true }])(
    "a request of both legs is refused, with all that a readback names: %j",
    (extra) => {
      const { scheduler } = setUp({ extra });
      const both = { ...PARAMS, do_remote_decode: true, remote_blocks_expiry_time: 99 };
      expect(() => scheduler.matchedTokens(request("r", both), 0)).toThrow(
        /do_remote_decode are both true/,
      );
    },
  );

  it("an abort before the order reaches the workers frees the blocks, and notifies P", () => {
    for (const admitted of [false, true]) {
      const { scheduler } = setUp();
      scheduler.matchedTokens(request("r"), 0);
      if (admitted) scheduler.afterAllocation(request("r"), blocks(7), 100);
      expect(scheduler.requestFinished(request("r"), blocks(7), "length")).toEqual({
        keepBlocks: false,
      });
      expect(stepOf(scheduler)).toMatchObject({
        receives: [],
        releases: [{ requestId: "cmpl-p" }],
        aborts: [],
        heartbeats: [],
      });
      expectRest(scheduler);
    }
  });

  it("sends one list of heartbeats per engine, whatever registration a request names", () => {
    const { scheduler } = setUp();
    scheduler.requestQueued(request("a"));
    scheduler.requestQueued(
      request("b", { ...PARAMS, remote_request_id: "cmpl-q", remote_registration_generation: 3 }),
    );
    scheduler.requestQueued(
      request("c", { ...PARAMS, remote_engine_id: "other", remote_request_id: "cmpl-o" }),
    );
    expect(stepOf(scheduler).heartbeats).toMatchObject([
      { engineId: "p-engine", begin: [{ requestId: "cmpl-p" }, { requestId: "cmpl-q" }] },
      { engineId: "other", begin: [{ requestId: "cmpl-o" }] },
    ]);
  });
});
