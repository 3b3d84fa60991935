import type { KvTransferParams } from "@kv/interface";
import { createScenario, prompt, started } from "@kv/testing/scenarios/scenario";
import type { SimEngine } from "@kv/testing/simulator/sim-engine";
import type { EngineRequest, SimEngineOptions } from "@kv/testing/simulator/sim-options";
import type { FaultRule } from "@kv/transport-memory";
import { describe, expect, it, onTestFinished } from "vitest";
import { pullConnector } from "../src/index.js";

// The second turn of a conversation (vLLM's `bidirectional_kv_xfer`): D keeps the KV of the first
// one, and P reads it back. The hazards are those of a router that errs, each of which was seen at
// vLLM 0.33 as wrong text with status 200, or as a request that hangs.

const ON = { bidirectional_kv_xfer: true, kv_recompute_threshold: 16 };
/**
 * D's cache holds one turn: as soon as D frees its blocks they are poisoned, and the next prompt
 * takes them.
 */
const ONE_TURN = { numBlocks: 4 };

interface Scene {
  readonly faults?: readonly FaultRule[];
  readonly prefill?: Partial<SimEngineOptions>;
  readonly decode?: Partial<SimEngineOptions>;
}

/** A P, a D, and D's parameters after a turn of 40 tokens and 21 of output: D has the KV of 60. */
async function firstTurn({ faults = [], prefill = {}, decode = {} }: Scene = {}) {
  const play = createScenario({ connector: pullConnector });
  onTestFinished(() => play.end());
  const received: [requestId: string, isVerified: boolean][] = [];
  const note = (requestId: string, isVerified: boolean) =>
    void received.push([requestId, isVerified]);
  const { p, d } = await play.pair(
    { extra: ON, received: note, ...prefill },
    { extra: ON, ...decode },
  );
  const turn = async (n = 1) => {
    const params = await play.prefilled(p, n);
    return await play.clock.settle(
      d.decode({ ...prompt(n), requestId: `d${n}`, outputTokens: 21, params }),
    );
  };
  const params = await turn();
  play.network.setFaults(faults);
  let turns = 0;
  /** The second turn's prompt at P, of 100 tokens. */
  const next = (
    change: Partial<EngineRequest> & { readonly cachedTokens?: number } = {},
    at = p,
  ) => {
    const work = started(
      at.prefill({ ...prompt(1, 100), requestId: `t${++turns}`, params, ...change }),
    );
    return work;
  };
  const read = (...given: Parameters<typeof next>) => play.outcome(next(...given));
  return { play, p, d, params, turn, next, read, received };
}

/** Blocks that D keeps. */
const keptBy = (engine: SimEngine) => engine.outstanding().kept;

describe("a second turn", () => {
  it.each([
    { p: 1, d: 1, blocks: [16, 16] },
    { p: 2, d: 1, blocks: [16, 32] },
    { p: 1, d: 2, blocks: [16, 16] },
    { p: 4, d: 2, blocks: [32, 16] },
    { p: 1, d: 4, blocks: [16, 16], kind: "mla", numKvHeads: 1 },
    { p: 4, d: 1, blocks: [16, 32], kind: "mla", numKvHeads: 1 },
    // Decode context parallelism: the ranks of a group share the sequence.
    { p: 1, d: 2, blocks: [16, 16], dcp: [1, 2], kind: "mla", numKvHeads: 1 },
    { p: 2, d: 1, blocks: [16, 16], dcp: [2, 1], kind: "mla", numKvHeads: 1 },
    { p: 2, d: 2, blocks: [16, 16], dcp: [2, 2], kind: "mla", numKvHeads: 1 },
    { p: 4, d: 2, blocks: [16, 16], dcp: [1, 2], kind: "mla", numKvHeads: 1 },
    { p: 2, d: 4, blocks: [16, 16], dcp: [2, 4], kind: "mla", numKvHeads: 1 },
    { p: 4, d: 4, blocks: [16, 16], dcp: [2, 2], kind: "mla", numKvHeads: 1 },
  ] as const)(
    "P reads back what D has, and D frees its blocks: %j",
    async ({ p, d, blocks, ...given }) => {
      const { dcp, ...cache } = { dcp: [1, 1], ...given };
      const scene = await firstTurn({
        prefill: { tpSize: p, dcpSize: dcp[0], blockSize: blocks[0], ...cache },
        decode: { tpSize: d, dcpSize: dcp[1], blockSize: blocks[1], ...cache },
      });
      expect(scene.params).toMatchObject({ remote_num_tokens: 60 });
      expect(keptBy(scene.d)).toBe(1);
      const params = await scene.play.clock.settle(scene.next());
      expect(scene.received).toEqual([["t1", true]]);
      await scene.play.frees(scene.d);
      // P's answer is that of any prompt, and the conversation goes on.
      expect(params).toMatchObject({
        do_remote_prefill: true,
        do_remote_decode: false,
        remote_num_tokens: 100,
      });
      const second = scene.d.decode({
        ...prompt(1, 100),
        requestId: "d2",
        outputTokens: 9,
        params,
      });
      const third = await scene.play.clock.settle(second);
      expect(third).toMatchObject({ do_remote_decode: true, remote_num_tokens: 108 });
      expect(await scene.play.outcome(scene.next({ numTokens: 130, params: third }))).toBe("ok");
    },
  );

  it("D's groups of ranks are smaller than its engine, and P's are finer: P is refused, and D's blocks are free after decoder_kv_blocks_ttl", async () => {
    const mla = { kind: "mla", numKvHeads: 1, tpSize: 4 } as const;
    const { play, d, read } = await firstTurn({
      prefill: { ...mla, dcpSize: 4 },
      decode: { ...mla, dcpSize: 2 },
    });
    expect(await read()).toBe("KV_PLAN_UNSUPPORTED");
    await play.clock.advance(481_000);
    expect(keptBy(d)).toBe(0);
  });

  it.each([61, 62, 64, 65, 80, 81])(
    "a prompt of %i tokens, at the borders of blocks",
    async (numTokens) => {
      const { read, received } = await firstTurn();
      expect(await read({ numTokens })).toBe("ok");
      expect(received).toHaveLength(1);
    },
  );

  it("reads only what P's prefix cache lacks, and nothing where it has all; D's blocks are free either way", async () => {
    for (const [cachedTokens, reads] of [
      [32, 1],
      [96, 0],
    ] as const) {
      const { play, d, read, received } = await firstTurn();
      expect(await read({ cachedTokens })).toBe("ok");
      expect(received).toHaveLength(reads);
      await play.frees(d);
    }
  });

  it("fewer tokens than kv_recompute_threshold are computed, and D is told all the same", async () => {
    for (const [threshold, reads] of [
      [60, 1],
      [61, 0],
      [0, 1],
    ] as const) {
      const extra = { ...ON, kv_recompute_threshold: threshold };
      const { play, d, read, received } = await firstTurn({ prefill: { extra } });
      expect(await read()).toBe("ok");
      expect(received).toHaveLength(reads);
      await play.frees(d);
    }
  });

  it("without the setting, D keeps nothing, and P computes and says that it was asked for more", async () => {
    const { params } = await firstTurn({ decode: { extra: {} } });
    expect(params).toEqual({});
    const scene = await firstTurn({
      prefill: { extra: {} },
      decode: { extra: { ...ON, decoder_kv_blocks_ttl: 5 } },
    });
    expect(await scene.play.outcome(scene.next())).toBe("ok");
    expect(scene.received).toEqual([]);
    expect(scene.play.logged("p", "readback-not-enabled")).toMatchObject([{ requestId: "t1" }]);
  });

  it("D keeps nothing of a request that was aborted, and its blocks for decoder_kv_blocks_ttl of one that nobody reads", async () => {
    const { play, p, d } = await firstTurn({
      decode: { extra: { ...ON, decoder_kv_blocks_ttl: 20 } },
    });
    const params = await play.prefilled(p, 2);
    const aborted = started(d.decode({ ...prompt(2), requestId: "d2", params }));
    await play.clock.advance(5);
    d.abort("d2");
    expect(await play.outcome(aborted)).toBe("KV_REQUEST_ABORTED");
    await play.clock.advance(19_000);
    expect(keptBy(d)).toBe(1);
    await play.frees(d, 1000);
  });
});

describe("what a router does wrong", () => {
  it("an object used twice: at the same P by name, at another P because D does not hold the blocks", async () => {
    const { play, turn, read } = await firstTurn({ decode: ONE_TURN });
    const other = await play.engine("p2", { extra: ON });
    expect(await read()).toBe("ok");
    await play.clock.advance(50);
    // D's blocks hold another conversation.
    await turn(2);
    expect(await read()).toBe("KV_REFERENCE_USED");
    expect(await read({}, other)).toBe("KV_LEASE_EXPIRED");
    await play.clock.advance(500_000);
  });

  it("two P's at once: both have read before D's blocks are free, or one is refused; never another's bytes", async () => {
    for (const delayMs of [0, 2, 5]) {
      const { play, next } = await firstTurn({ decode: ONE_TURN });
      const other = await play.engine("p2", { extra: ON });
      const first = next();
      await play.clock.advance(delayMs);
      const second = next({}, other);
      expect(await play.outcome(first)).toBe("ok");
      expect(["ok", "KV_LEASE_EXPIRED"]).toContain(await play.outcome(second));
    }
  });

  it.each([
    ["one token of the prompt differs", { changedToken: 0 }],
    ["one token of the output differs", { changedToken: 59 }],
    ["another prompt", { prompt: 7 }],
    ["another adapter, cache salt or image", { prompt: 8, sameTokensAs: 1 }],
  ])("%s: refused by name, and D's blocks are free", async (_, change) => {
    const { play, d, read } = await firstTurn();
    expect(await read(change)).toBe("KV_PROMPT_MISMATCH");
    await play.frees(d);
  });

  it("a token after those that D has differs: nothing is wrong", async () => {
    const { read } = await firstTurn();
    expect(await read({ changedToken: 60 })).toBe("ok");
  });

  it.each([40, 50, 59])(
    "a shorter prompt, of %i tokens: refused, and D's blocks are free",
    async (numTokens) => {
      const { play, d, read, received } = await firstTurn();
      expect(await read({ numTokens })).toBe("KV_REQUEST_INVALID");
      await play.clock.advance(50);
      expect([keptBy(d), received]).toEqual([0, []]);
    },
  );

  it("expired, and D's blocks used anew", async () => {
    const decode = { ...ONE_TURN, extra: { ...ON, decoder_kv_blocks_ttl: 5 } };
    const { play, turn, read } = await firstTurn({ decode });
    await play.clock.advance(6000);
    await turn(2);
    expect(await read()).toBe("KV_LEASE_EXPIRED");
    await play.clock.advance(6000);
  });

  it.each([true, false])(
    "D restarted under the same engine id; P has met it: %s",
    async (hasMet) => {
      const { play, d, turn, read } = await firstTurn();
      if (hasMet) expect(await read({ params: await turn(2), prompt: 2 })).toBe("ok");
      await d.kill();
      await play.engine("d", { extra: ON });
      expect(["KV_GENERATION_STALE", "KV_TRANSFER_FAILED", "KV_PEER_DISCONNECTED"]).toContain(
        await read(),
      );
    },
  );

  it("D is gone: refused, not hanging", async () => {
    const { d, read } = await firstTurn();
    await d.kill();
    expect(await read()).toBe("KV_SIDE_CHANNEL_UNREACHABLE");
  });

  it("the blocks are not those of the object", async () => {
    const { params, read } = await firstTurn();
    const [ids] = params.remote_block_ids as number[][];
    const others = { ...params, remote_block_ids: [ids?.toReversed()] };
    expect(await read({ params: others })).toBe("KV_LEASE_EXPIRED");
  });

  it.each([
    "remote_num_tokens",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
  ])("%s is missing: refused by its name", async (key) => {
    const { play, params, next } = await firstTurn({
      decode: { extra: { ...ON, decoder_kv_blocks_ttl: 5 } },
    });
    const work = next({ params: { ...params, [key]: null } });
    await expect(play.clock.settle(work)).rejects.toMatchObject({
      code: "KV_REQUEST_INVALID",
      message: expect.stringContaining(key),
    });
  });
});

describe.each(["fail", "recompute"] as const)("kv_load_failure_policy %s", (loadFailurePolicy) => {
  const computed = loadFailurePolicy === "recompute";
  const faults: readonly FaultRule[] = [{ fault: "fail", operation: "READ", times: 1 }];

  it("a READ that fails: computed by P or refused, at once", async () => {
    const { play, d, read } = await firstTurn({ faults, prefill: { loadFailurePolicy } });
    expect(await play.within(100, read())).toBe(computed ? "ok" : "KV_TRANSFER_FAILED");
    await play.frees(d);
  });

  it("a READ that never ends: at request_timeout", async () => {
    const { read } = await firstTurn({
      faults: [{ fault: "drop", operation: "READ", times: 1 }],
      prefill: { loadFailurePolicy, extra: { ...ON, request_timeout: 7 } },
    });
    expect(await read()).toBe(computed ? "ok" : "KV_REQUEST_TIMEOUT");
  });

  it("a reference that is refused before it is read: used, shorter, incomplete", async () => {
    const { play, params, turn, read } = await firstTurn({ prefill: { loadFailurePolicy } });
    expect(await read()).toBe("ok");
    expect(await read()).toBe(computed ? "ok" : "KV_REFERENCE_USED");
    const invalid = computed ? "ok" : "KV_REQUEST_INVALID";
    expect(await read({ numTokens: 40, params: await turn(2) })).toBe(invalid);
    expect(await read({ params: { ...params, remote_port: "x" } })).toBe(invalid);
    expect(play.logged("p", "readback-refused").length > 0).toBe(computed);
  });

  it("another prompt, and a D that is gone", async () => {
    const { d, turn, read } = await firstTurn({ prefill: { loadFailurePolicy } });
    expect(await read({ prompt: 7 })).toBe(computed ? "ok" : "KV_PROMPT_MISMATCH");
    const params = await turn(2);
    await d.kill();
    const outcome = await read({ params, prompt: 2 });
    expect(outcome === "ok").toBe(computed);
  });
});

describe("a D that is a vLLM", () => {
  const decode = { plain: true };

  it("its KV is read, and does not enter P's prefix cache; nor, from such a P, a D's", async () => {
    const { play, p, d, next, read, received } = await firstTurn({ decode });
    const params = await play.clock.settle(next());
    expect(received).toEqual([["t1", false]]);
    await play.frees(d);
    const verified: boolean[] = [];
    const own = await play.engine("d2", { extra: ON, received: (_, is) => void verified.push(is) });
    const second = own.decode({ ...prompt(1, 100), requestId: "d2", outputTokens: 9, params });
    const third = await play.clock.settle(second);
    expect(verified).toEqual([false]);
    // Back at P: D of @kv holds the tokens, and says that nobody has compared their KV.
    expect(await read({ numTokens: 130, params: third })).toBe("ok");
    expect(received).toEqual([
      ["t1", false],
      ["t2", false],
    ]);
    expect(keptBy(p)).toBe(1);
  });

  it("with cache_unverified_kv it enters P's prefix cache", async () => {
    const { read, received } = await firstTurn({
      decode,
      prefill: { extra: { ...ON, cache_unverified_kv: true } },
    });
    expect(await read()).toBe("ok");
    expect(received).toEqual([["t1", true]]);
  });

  it("an expired object is declined from 5 s before its end, and one without its end is refused", async () => {
    const { play, params, next } = await firstTurn({
      decode: { ...decode, extra: { ...ON, decoder_kv_blocks_ttl: 20 } },
    });
    const { remote_blocks_expiry_time: _, ...endless } = params;
    await expect(play.clock.settle(next({ params: endless }))).rejects.toMatchObject({
      code: "KV_REQUEST_INVALID",
      message: expect.stringContaining("remote_blocks_expiry_time"),
    });
    const late = await firstTurn({
      decode: { ...decode, extra: { ...ON, decoder_kv_blocks_ttl: 20 } },
    });
    await late.play.clock.advance(15_500);
    expect(await late.play.outcome(late.next())).toBe("KV_LEASE_EXPIRED");
  });
});

describe("the object of a D", () => {
  it("has vLLM's keys in vLLM's order, and no transfer id or trace of the turn", async () => {
    const { play, params } = await firstTurn();
    const { kv_peer: peer, ...vllm } = params as KvTransferParams & { kv_peer: object };
    expect(Object.entries(vllm)).toEqual([
      ["do_remote_prefill", false],
      ["do_remote_decode", true],
      ["remote_block_ids", [expect.any(Array)]],
      ["remote_engine_id", "d"],
      ["remote_request_id", "d1"],
      ["remote_host", "d"],
      ["remote_port", expect.any(Number)],
      ["tp_size", 1],
      ["dcp_size", 1],
      ["pp_size", 1],
      ["remote_num_tokens", 60],
      ["remote_blocks_expiry_time", expect.closeTo(480 + play.clock.now() / 1000, 0)],
      ["remote_registration_generation", 1],
      ["transfer_mode", "pull"],
    ]);
    expect((vllm["remote_block_ids"] as number[][])[0]).toHaveLength(4);
    expect(Object.keys(peer)).toEqual(["incarnation", "generation", "capability"]);
    await play.clock.advance(500_000);
  });
});
