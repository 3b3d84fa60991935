import type { FailedReceive } from "@kv/interface";
import { afterEach, expect, test } from "vitest";
import { prefill, type TransferParams } from "./completion.js";
import {
  type HeadlessDecode,
  type HeadlessDecodeOptions,
  openHeadlessDecode,
  requestOf,
  UNTOUCHED,
} from "./headless-decode.js";
import { expired, freedTo, freshId, keptPrompt, legOf, pass, usage } from "./kept-prompts.js";
import { onceMoreAfterTimeout } from "./once-more.js";
import { RECORDED_FULL_BLOCKS, RECORDED_TOKENS, recordedHeads } from "./recorded-kv.js";
import type { VllmServer } from "./server.js";
import { prompt, TINY } from "./tiny-peer.js";

/** Far apart and out of order, so that the test detects blocks that land in the wrong place. */
const OUR_BLOCKS = [5, 2, 9, 11];
const ROUNDING = 1e-4;
/** The wait in leases. A heartbeat adds two thirds of a lease, and D sends one every sixth of a lease. */
const BEYOND_LEASE = 1.4;

const timedOut = (error: unknown) => (error as FailedReceive).code === "KV_SIDE_CHANNEL_TIMEOUT";

/** Our decode side and a real vLLM prefill worker. The bytes that arrive equal those that another reader recorded, and P frees its blocks. */
export function decodeSuite(server: () => VllmServer): void {
  let d: HeadlessDecode | undefined;
  afterEach(async () => {
    await d?.close();
    d = undefined;
  });

  async function open(options: Partial<HeadlessDecodeOptions> = {}): Promise<HeadlessDecode> {
    await d?.close();
    d = await openHeadlessDecode({ kind: server().kind, ...options });
    return d;
  }
  const request = (params: TransferParams, tokens = RECORDED_TOKENS) =>
    requestOf(legOf(params.remote_request_id), tokens, params);

  /** Receives a prompt on a new decode side. After a handshake timeout it tries again. */
  async function received(
    options: Partial<HeadlessDecodeOptions>,
    numComputedTokens = 0,
    { tokens = RECORDED_TOKENS, blocks = OUR_BLOCKS as readonly number[] } = {},
  ) {
    return onceMoreAfterTimeout(async () => {
      const decode = await open(options);
      const { params, before } = await keptPrompt(server(), prompt(tokens), { id: freshId() });
      const asked = request(params, tokens);
      const { failure } = await decode.receive(asked, blocks, { numComputedTokens });
      if (failure !== undefined) throw Object.assign(new Error(failure.message), failure);
      return { decode, asked, before };
    }, timedOut);
  }

  function expectRecorded(decode: HeadlessDecode, tp: number, first = 0, rounded = server().tp > 1): void {
    const count = TINY.kvHeads / tp;
    for (let tpRank = 0; tpRank < tp; tpRank++) {
      for (let layer = 0; layer < TINY.layers; layer++) {
        for (let n = first; n < RECORDED_FULL_BLOCKS; n++) {
          const landed = decode.block(tpRank, layer, OUR_BLOCKS[n] ?? 0);
          const recorded = recordedHeads(layer, n, { first: tpRank * count, count });
          const where = `rank ${tpRank}, layer ${layer}, block ${n}`;
          // The recording is from a worker with TP 1. From the first all-reduce on, TP 2 adds in another order, so the values differ by rounding.
          if (!rounded || (layer === 0 && server().tp > 1))
            expect(Buffer.compare(landed, recorded), where).toBe(0);
          else expect(largestDifference(landed, recorded), where).toBeLessThan(ROUNDING);
        }
        const others = [0, 1, 3, 4, 6, 7, 8, 10, 12, 13, 14, 15, ...OUR_BLOCKS.slice(0, first)];
        for (const block of others) expectUntouched(decode, tpRank, layer, block);
      }
    }
  }

  for (const tp of [1, 2]) {
    test(`to our TP ${tp}: the full blocks are those recorded, the rest is as it was, and the peer frees its own`, async () => {
      const before = await expired(server());
      const { decode, asked, before: used } = await received({ tp });
      expectRecorded(decode, tp);
      await freedTo(server(), used);
      expect(await expired(server())).toBe(before);
      decode.finish(asked, OUR_BLOCKS);
      expect(decode.outstanding()).toMatchObject({ requests: 0, heartbeats: 0, receives: 0, unreported: 0 });
    });
  }

  test("offered before the prompt is computed: written when it is", async ({ skip }) => {
    if (server().kind.mode === "pull") skip("in pull the prompt is first");
    const { decode, asked: first, before } = await received({});
    decode.finish(first, OUR_BLOCKS);
    // What a proxy knows of a prefill worker before the prompt is computed.
    const { remote_engine_id, remote_host, remote_port, tp_size } = first.kvTransferParams ?? {};
    const id = freshId();
    const coordinates = { remote_engine_id, remote_host, remote_port, tp_size, remote_request_id: id };
    const asked = requestOf(legOf(`cmpl-${id}-0`), RECORDED_TOKENS, {
      ...{ do_remote_prefill: true, do_remote_decode: false, transfer_mode: "push" },
      ...coordinates,
    });
    for (const block of OUR_BLOCKS)
      for (let layer = 0; layer < TINY.layers; layer++) decode.block(0, layer, block).fill(UNTOUCHED);
    const receiving = decode.receive(asked, OUR_BLOCKS);
    await prefill(server().url, prompt(RECORDED_TOKENS), { id });
    expect(await receiving).toEqual({ failure: undefined, aborted: false });
    expectRecorded(decode, 1);
    await freedTo(server(), before);
    decode.finish(asked, OUR_BLOCKS);
  });

  test("a prefix that is here already is not sent: the rest lands behind it", async () => {
    const { decode, asked, before } = await received({}, 2 * TINY.blockSize);
    expectRecorded(decode, 1, 2);
    await freedTo(server(), before);
    decode.finish(asked, OUR_BLOCKS);
  });

  test("a prompt that the peer computes in chunks: its beginning is as recorded", async () => {
    const blocks = [...OUR_BLOCKS, 3, 1, 4, 6, 7, 8];
    const { decode, asked, before } = await received({}, 0, { tokens: 300, blocks });
    for (let layer = 0; layer < TINY.layers; layer++) {
      for (let n = 0; n < RECORDED_FULL_BLOCKS; n++) {
        const recorded = recordedHeads(layer, n, { first: 0, count: TINY.kvHeads });
        expect(largestDifference(decode.block(0, layer, blocks[n] ?? 0), recorded)).toBeLessThan(ROUNDING);
      }
    }
    await freedTo(server(), before);
    decode.finish(asked, blocks);
  });

  test("a request that is given up under way: its blocks come back on both sides", async () => {
    const { decode, asked, before } = await received({});
    decode.finish(asked, OUR_BLOCKS);
    await freedTo(server(), before);
    const { params } = await keptPrompt(server(), prompt(RECORDED_TOKENS), { id: freshId() });
    const abort = new AbortController();
    const given = decode.receive(request(params), OUR_BLOCKS, { signal: abort.signal });
    abort.abort();
    expect((await given).aborted).toBe(true);
    await freedTo(server(), before);
    expect(decode.outstanding()).toMatchObject({ requests: 0, heartbeats: 0, receives: 0, unreported: 0 });
  });

  test("a lease is kept alive by heartbeats past its length; one that nobody keeps ends, and the blocks are free", async () => {
    const p = server();
    const {
      decode,
      asked: first,
      before: used,
    } = await received({
      // D sends heartbeats as often as a vLLM with the peer's settings.
      extra: { kv_lease_duration: p.leaseSeconds },
    });
    decode.finish(first, OUR_BLOCKS);
    await freedTo(p, used);
    const before = await expired(p);
    const kept = await keptPrompt(p, prompt(RECORDED_TOKENS), { id: freshId() });
    const asked = request(kept.params);
    decode.queue(asked);
    const alone = await keptPrompt(p, prompt(70), { id: freshId() });
    await pass(p, p.leaseSeconds * BEYOND_LEASE);
    // The two prompts share their first two blocks.
    expect(await usage(p)).toBeLessThan((await alone.before) + 1e-9);
    expect(await expired(p)).toBe(before + 1);
    for (const block of OUR_BLOCKS)
      for (let layer = 0; layer < TINY.layers; layer++) decode.block(0, layer, block).fill(UNTOUCHED);
    expect(await decode.receive(asked, OUR_BLOCKS)).toEqual({ failure: undefined, aborted: false });
    expectRecorded(decode, 1);
    await freedTo(p, kept.before);
    expect(await expired(p)).toBe(before + 1);
    decode.finish(asked, OUR_BLOCKS);
  });

  test("all of the prompt is here already, or it is given up in the queue: the peer has its blocks back", async () => {
    const p = server();
    const { decode, asked: first, before } = await received({});
    decode.finish(first, OUR_BLOCKS);
    await freedTo(p, before);
    const expiredBefore = await expired(p);
    const hit = request((await keptPrompt(p, prompt(RECORDED_TOKENS), { id: freshId() })).params);
    expect(await decode.receive(hit, OUR_BLOCKS, { numComputedTokens: RECORDED_TOKENS })).toEqual({
      failure: undefined,
      aborted: false,
    });
    decode.finish(hit, OUR_BLOCKS);
    // Otherwise P may free these blocks in the step that computes the next prompt, and P's cache usage would prove nothing.
    await freedTo(p, before);
    const { params } = await keptPrompt(p, prompt(70), { id: freshId() });
    decode.giveUpQueued(request(params, 70));
    await freedTo(p, before);
    // vLLM's push has no notification for these two cases, so both leases end at P.
    expect(await expired(p)).toBe(expiredBefore + (p.kind.mode === "push" ? 2 : 0));
  });

  test("another dtype is refused before a byte moves, and the error names it though the peer sends only a digest", async () => {
    const decode = await open({ dtype: "torch.bfloat16" });
    const { params } = await keptPrompt(server(), prompt(RECORDED_TOKENS), { id: freshId() });
    const { failure } = await decode.receive(request(params), OUR_BLOCKS);
    expect(failure).toMatchObject({
      code: "KV_HANDSHAKE_INCOMPATIBLE",
      failureType: server().kind.mode === "push" ? "push_reg_handshake_failed" : "handshake_failed",
    });
    expect(failure?.message).toContain('dtype is "torch.bfloat16" here and "torch.float32" there');
    expectUntouched(decode, 0, 0, OUR_BLOCKS[0] ?? 0);
  });
}

function expectUntouched(decode: HeadlessDecode, tpRank: number, layer: number, block: number): void {
  const where = `rank ${tpRank}, layer ${layer}, block ${block}`;
  expect(
    decode.block(tpRank, layer, block).every((byte) => byte === UNTOUCHED),
    where,
  ).toBe(true);
}

/** The largest difference between two arrays of float32. The values lie between -6 and 6. */
function largestDifference(a: Uint8Array, b: Uint8Array): number {
  const x = new Float32Array(a.slice().buffer);
  const y = new Float32Array(b.slice().buffer);
  return x.reduce((most, value, i) => Math.max(most, Math.abs(value - (y[i] ?? Number.NaN))), 0);
}
