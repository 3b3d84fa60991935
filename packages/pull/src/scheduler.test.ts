import { readTransferConfig } from "@kv/connector";
import {
  type BlockIds,
  type ConnectorRequest,
  type FinishReason,
  type KvCacheConfig,
  KvError,
  type KvTransferParams,
  silentLog,
} from "@kv/interface";
import { engineIdentity } from "@kv/testing/engine-identity";
import { manualClock } from "@kv/testing/manual-clock";
import { simConfig } from "@kv/testing/simulator/sim-config";
import { memoryNetwork, memorySideChannel } from "@kv/transport-memory";
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

function setUp(
  cache: KvCacheConfig = simConfig(16),
  extra: Readonly<Record<string, unknown>> = {},
  ppSize = 1,
) {
  const clock = manualClock(1000);
  const warned: string[] = [];
  const scheduler = createPullScheduler({
    config: readTransferConfig({
      kv_connector: "pull",
      kv_role: "kv_both",
      kv_connector_extra_config: extra,
    }),
    engine: engineIdentity("d-engine", { ppSize }),
    cache,
    sideChannel: memorySideChannel({ network: memoryNetwork({ clock }) }),
    clock,
    log: { ...silentLog, warn: (event) => void warned.push(event) },
  });
  const decode = {
    queued: (request: ConnectorRequest) => scheduler.requestQueued(request),
    tokensToPrefill: (request: ConnectorRequest) => scheduler.tokensToPrefill(request),
    matched: (request: ConnectorRequest, computed: number) =>
      scheduler.matchedTokens(request, computed),
    allocated: (request: ConnectorRequest, blockIds: BlockIds, tokens: number) =>
      scheduler.afterAllocation(request, blockIds, tokens),
    finished: (request: ConnectorRequest, reason: FinishReason = "length") =>
      scheduler.requestFinished(request, blocks(7), reason),
    received: (requestId: string) =>
      scheduler.applyWorkerOutput({
        finishedSending: [],
        finishedReceiving: [requestId],
        failedReceiving: [],
        failedBlockIds: [],
      }),
    firstToken: (request: ConnectorRequest) => scheduler.firstToken(request),
    takeStep: () => scheduler.buildStepMetadata() as PullStepMetadata,
    outstanding: () => scheduler.outstanding(),
    hasPendingWork: () => scheduler.hasPendingWork(),
  };
  const request = (
    requestId: string,
    params: KvTransferParams = PARAMS,
    numPromptTokens = 100,
  ) => ({
    requestId,
    numPromptTokens,
    kvTransferParams: params,
  });
  return { clock, decode, scheduler, request, warned };
}
const blocks = (count: number) => [Array.from({ length: count }, (_, i) => i + 1)];
const rest = (decode: ReturnType<typeof setUp>["decode"]) => [
  decode.outstanding()["requests"],
  decode.outstanding()["heartbeats"],
  decode.hasPendingWork(),
];

describe("seed_first_token (vllm#51919)", () => {
  const extra = { seed_first_token: true };
  const seeded = { ...PARAMS, first_token_ids: [42] };
  const ofKv = { ...seeded, kv_peer: { incarnation: "p", generation: 1, sampling: "greedy" } };
  const asked = (
    params: KvTransferParams,
    more: Partial<ConnectorRequest> = {},
    on: object = extra,
  ) => {
    const { decode, request } = setUp(simConfig(16), { ...on });
    return decode.firstToken({ ...request("d", params), samplingKey: "greedy", ...more });
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
    const on = setUp(simConfig(16), extra);
    expect(() => on.decode.matched(on.request("d", malformed), 0)).toThrow(
      /first_token_ids is a list of 2, not a list of one token id/,
    );
    const off = setUp();
    expect(off.decode.matched(off.request("d", malformed), 0)).toEqual({
      tokens: 100,
      async: true,
    });
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
    const { scheduler, request } = setUp(given.cache, given.extra);
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
    const { decode, request } = setUp(states);
    expect(decode.matched(request("r", told(99)), 0)).toEqual({ tokens: 99, async: true });
    decode.allocated(request("r", told(99)), [...blocks(7), [8]], 99);
    expect(decode.takeStep().receives).toMatchObject([
      { remote: { numTokens: 99 }, localBlockIds: [[1, 2, 3, 4, 5, 6, 7], [8]] },
    ]);
  });

  it.each([
    ["has computed it", 100, "has computed 100"],
    ["does not say how many tokens it computes", null, "does not say how many it computes"],
  ])(
    "refuses the state of one that %s: the last token would be applied to it twice; its blocks are released",
    (_, tokens, said) => {
      const { decode, request } = setUp(states);
      expect(refusal(() => decode.matched(request("r", told(tokens)), 0))).toBe(
        `${STATE}: a prefill engine must leave the last 1 of 100 prompt tokens to this one, and it ${said} (remote_num_tokens)`,
      );
      expect(decode.takeStep()).toMatchObject({
        receives: [],
        releases: [{ requestId: "cmpl-p" }],
      });
      expect(decode.finished(request("r", told(tokens)))).toEqual({ keepBlocks: false });
      expect(rest(decode)).toEqual([0, 0, false]);
    },
  );

  it("computes a prompt of one token itself", () => {
    const { decode, request } = setUp(states);
    const one = { ...told(1), remote_block_ids: [[11], [20]] };
    expect(decode.matched(request("r", one, 1), 0)).toEqual({ tokens: 0, async: false });
  });

  it("takes nothing where a prefix hit leaves only the tokens that it computes itself", () => {
    const { decode, request } = setUp(replayed);
    expect(decode.matched(request("r", told(97, 1)), 96)).toEqual({ tokens: 1, async: true });
    expect(decode.matched(request("r", told(97, 1)), 97)).toEqual({ tokens: 0, async: false });
    expect(
      refusal(() =>
        decode.matched(request("s", { ...told(98, 1), remote_request_id: "other" }), 0),
      ),
    ).toMatch(
      /prefillBackoffTokens of the KV cache is 3: a prefill engine must leave the last 3 of 100 prompt tokens to this one, and it has computed 98/,
    );
  });

  it("prefills for a decode engine that computes the last token itself, where its own engine leaves it out", () => {
    const { decode, request } = setUp(states);
    const produced = request("p", { do_remote_decode: true, do_remote_prefill: false });
    expect(decode.tokensToPrefill(produced)).toBe(99);
    const shortened = { ...produced, numPromptTokens: 99 };
    expect(decode.matched(shortened, 0)).toEqual({ tokens: 0, async: false });
    decode.allocated(shortened, [...blocks(7), [8]], 0);
    // Of requests that no peer takes part in, nothing is left out, and of no more tokens than are
    // left out neither.
    expect(decode.tokensToPrefill(request("own", {}))).toBe(100);
    expect(decode.tokensToPrefill(request("one", { do_remote_decode: true }, 1))).toBe(1);
  });

  it("does not prefill for a decode engine where its own engine computes all tokens", () => {
    const { decode, request } = setUp(states);
    const produced = request("p", { do_remote_decode: true, do_remote_prefill: false });
    const message = `${STATE}: a prefill engine must leave the last 1 tokens of a prompt to the decode engine, and this one computes all of them`;
    expect(refusal(() => decode.matched(produced, 0))).toBe(message);
    expect(refusal(() => decode.allocated(produced, [...blocks(7), [8]], 0))).toBe(message);
    expect(decode.tokensToPrefill(produced)).toBe(99);
    expect(refusal(() => decode.matched(produced, 0))).toMatch(/computes 100, not 99/);
    expect(rest(decode)).toEqual([0, 0, false]);
    // Requests that no peer takes part in are none of its business.
    expect(decode.matched(request("own", {}), 0)).toEqual({ tokens: 0, async: false });
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
      const { decode, request } = setUp(states, extra);
      const left = decode.tokensToPrefill(request("r", back, numTokens));
      const matched = decode.matched(request("r", back, left), 0);
      decode.allocated(request("r", back, left), [...blocks(7), [8]], matched.tokens);
      const { receives, releases } = decode.takeStep();
      return [left, matched.tokens, receives.length, releases.length];
    };
    expect(asks(100)).toEqual([99, 97, 1, 0]);
    expect(asks(99)).toEqual([98, 97, 1, 0]);
    // The state has the last token that P computes: it would be applied to it twice.
    expect(asks(98)).toEqual([97, 0, 0, 1]);
  });

  it("warns that D keeps nothing where its engine does not count, and not of a request that was refused", () => {
    const { decode, request, warned } = setUp(simConfig(16), { bidirectional_kv_xfer: true });
    decode.finished(request("refused"), "aborted");
    expect(warned).toEqual([]);
    decode.finished(request("whole"));
    expect(warned).toEqual(["readback-not-offered"]);
  });

  it("an engine with pipeline stages is refused bidirectional_kv_xfer: it cannot read", () => {
    expect(() => setUp(simConfig(16), { bidirectional_kv_xfer: true }, 2)).toThrow(
      /bidirectional_kv_xfer is true, and this engine has 2 pipeline stages/,
    );
  });

  it("a number that is none is refused when the scheduler is created", () => {
    expect(() => setUp({ ...replayed, prefillBackoffTokens: 0.5 })).toThrow(
      /prefillBackoffTokens is 0.5, expected 0 or more/,
    );
  });
});

describe("decode scheduler", () => {
  it("reads the whole prompt from P once, and sends heartbeats until it is received", () => {
    const { decode, request, clock } = setUp();
    decode.queued(request("r"));
    expect(decode.takeStep()).toMatchObject({
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
    expect(decode.matched(request("r"), 0)).toEqual({ tokens: 100, async: true });
    decode.allocated(request("r"), blocks(7), 100);
    const { receives, heartbeats } = decode.takeStep();
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
    expect(decode.matched(request("r"), 0)).toEqual({ tokens: 0, async: false });
    decode.received("r");
    expect(decode.takeStep()).toMatchObject({
      releases: [{ requestId: "cmpl-p" }],
      heartbeats: [{ begin: [], end: [{ requestId: "cmpl-p" }] }],
    });
    expect(decode.finished(request("r"))).toEqual({ keepBlocks: false });
    expect(rest(decode)).toEqual([0, 0, false]);
  });

  it("on a partial prefix hit, reads only the missing blocks", () => {
    const { decode, request } = setUp();
    expect(decode.matched(request("r"), 32)).toEqual({ tokens: 68, async: true });
    decode.allocated(request("r"), blocks(9), 68);
    expect(decode.takeStep().receives).toMatchObject([
      { localBlockIds: [[3, 4, 5, 6, 7]], localComputedBlocks: [2] },
    ]);
  });

  it("on a full prefix hit, reads nothing, does not wait, and notifies P", () => {
    const { decode, request } = setUp();
    expect(decode.matched(request("r"), 100)).toEqual({ tokens: 0, async: false });
    decode.allocated(request("r"), blocks(7), 0);
    expect(decode.takeStep()).toMatchObject({
      receives: [],
      releases: [{ requestId: "cmpl-p" }],
      heartbeats: [],
    });
    expect(decode.finished(request("r"))).toEqual({ keepBlocks: false });
    expect(decode.takeStep().releases).toEqual([]);
    expect(rest(decode)).toEqual([0, 0, false]);
  });

  it("reads at most the tokens that P holds; without their number the whole prompt", () => {
    const { decode, request } = setUp();
    expect(decode.matched(request("short", { ...PARAMS, remote_num_tokens: 40 }), 0).tokens).toBe(
      40,
    );
    expect(
      decode.matched(request("silent", { ...PARAMS, remote_num_tokens: null }), 0).tokens,
    ).toBe(100);
  });

  it("refuses a placeholder prompt of 4 tokens for P's 42, with both numbers, and releases P's blocks", () => {
    const { decode, request } = setUp();
    // In blocks of 64 both prompts have one block.
    const params = { ...PARAMS, remote_block_ids: [[11]], remote_num_tokens: 42 };
    expect(() => decode.matched(request("r", params, 4), 0)).toThrow(
      expect.objectContaining({
        code: "KV_REQUEST_INVALID",
        message: expect.stringMatching(
          /remote_num_tokens is 42, and the prompt has 4 tokens/,
        ) as string,
      }) as Error,
    );
    expect(decode.takeStep().releases).toMatchObject([{ requestId: "cmpl-p" }]);
    const other = { ...params, remote_request_id: "cmpl-q" };
    expect(decode.matched(request("same", other, 42), 0).tokens).toBe(42);
  });

  it("refuses invalid parameters every time, and notifies P once if they contain its address", () => {
    const { decode, request } = setUp();
    const bad = request("r", { ...PARAMS, remote_block_ids: [[-1]] });
    decode.queued(bad);
    for (let i = 0; i < 2; i++) {
      expect(() => decode.matched(bad, 0)).toThrow(
        expect.objectContaining({ code: "KV_REQUEST_INVALID" }) as Error,
      );
    }
    expect(decode.takeStep().releases).toMatchObject([{ requestId: "cmpl-p", port: 5600 }]);
    expect(decode.finished(bad)).toEqual({ keepBlocks: false });
    expect(rest(decode)).toEqual([0, 0, false]);

    const nowhere = request("n", { ...PARAMS, remote_host: null });
    expect(() => decode.matched(nowhere, 0)).toThrow();
    expect(decode.takeStep().releases).toEqual([]);
    const push = request("p", { ...PARAMS, transfer_mode: "push" });
    expect(() => decode.matched(push, 0)).toThrow(/push/);
    expect(decode.takeStep().releases).toEqual([]);
  });

  it.each([{}, { bidirectional_kv_xfer: true }])(
    "a request of both legs is refused, with all that a readback names: %j",
    (extra) => {
      const { decode, request } = setUp(simConfig(16), extra);
      const both = { ...PARAMS, do_remote_decode: true, remote_blocks_expiry_time: 99 };
      expect(() => decode.matched(request("r", both), 0)).toThrow(/do_remote_decode are both true/);
    },
  );

  it("an abort before the order reaches the workers frees the blocks, and notifies P", () => {
    for (const admitted of [false, true]) {
      const { decode, request } = setUp();
      decode.matched(request("r"), 0);
      if (admitted) decode.allocated(request("r"), blocks(7), 100);
      expect(decode.finished(request("r"))).toEqual({ keepBlocks: false });
      expect(decode.takeStep()).toMatchObject({
        receives: [],
        releases: [{ requestId: "cmpl-p" }],
        aborts: [],
        heartbeats: [],
      });
      expect(rest(decode)).toEqual([0, 0, false]);
    }
  });

  it("an abort during a transfer keeps the blocks until the workers report them", () => {
    const { decode, request } = setUp();
    decode.matched(request("r"), 0);
    decode.allocated(request("r"), blocks(7), 100);
    decode.takeStep();
    expect(decode.finished(request("r"))).toEqual({ keepBlocks: true });
    expect(decode.takeStep()).toMatchObject({
      aborts: ["r"],
      heartbeats: [{ begin: [], end: [{}] }],
    });
    expect(decode.outstanding()["requests"]).toBe(1);
    decode.received("r");
    expect(decode.takeStep().releases).toMatchObject([{ requestId: "cmpl-p" }]);
    expect(rest(decode)).toEqual([0, 0, false]);
  });

  it("sends one list of heartbeats per engine, whatever registration a request names", () => {
    const { decode, request } = setUp();
    decode.queued(request("a"));
    decode.queued(
      request("b", { ...PARAMS, remote_request_id: "cmpl-q", remote_registration_generation: 3 }),
    );
    decode.queued(
      request("c", { ...PARAMS, remote_engine_id: "other", remote_request_id: "cmpl-o" }),
    );
    expect(decode.takeStep().heartbeats).toMatchObject([
      { engineId: "p-engine", begin: [{ requestId: "cmpl-p" }, { requestId: "cmpl-q" }] },
      { engineId: "other", begin: [{ requestId: "cmpl-o" }] },
    ]);
  });
});
