import { afterEach, expect, test } from "vitest";
import { freshId, prefill } from "./completion.js";
import {
  type HeadlessDecode,
  type HeadlessDecodeOptions,
  isTimeout,
  OUR_BLOCKS,
  openHeadlessDecode,
  receiveAll,
  UNTOUCHED,
} from "./headless-decode.js";
import {
  expired,
  otherLegId,
  prefillAndHold,
  untilFreed,
  usage,
  waitSeconds,
} from "./held-blocks.js";
import { RECORDED_FULL_BLOCKS, RECORDED_TOKENS, recordedHeads } from "./recorded-kv.js";
import type { VllmServer } from "./server.js";
import { prompt, TINY } from "./tiny-peer.js";
import { retryAfterTimeout } from "./until.js";

const ROUNDING = 1e-4;
const RECEIVED = { failure: undefined, aborted: false };
const NOTHING = { requests: 0, heartbeats: 0, receives: 0, unreported: 0 };
/** A heartbeat adds two thirds of a lease, and D sends one every sixth. */
const BEYOND_LEASE = 1.4;

/** The bytes equal those that another reader recorded, and P frees its blocks. */
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
  const held = (tokens = RECORDED_TOKENS) => prefillAndHold(server(), prompt(tokens));

  async function received(
    options: Partial<HeadlessDecodeOptions>,
    numComputedTokens = 0,
    { tokens = RECORDED_TOKENS, blocks = OUR_BLOCKS } = {},
  ) {
    return retryAfterTimeout(async () => {
      const decode = await open(options);
      const { asked, before } = await held(tokens);
      await receiveAll(decode, asked, blocks, numComputedTokens);
      return { decode, asked, before };
    }, isTimeout);
  }

  function expectRecorded(
    decode: HeadlessDecode,
    tp: number,
    first = 0,
    rounded = server().tp > 1,
  ): void {
    const count = TINY.kvHeads / tp;
    for (let tpRank = 0; tpRank < tp; tpRank++) {
      for (let layer = 0; layer < TINY.layers; layer++) {
        for (let n = first; n < RECORDED_FULL_BLOCKS; n++) {
          const landed = decode.block(tpRank, layer, OUR_BLOCKS[n] ?? 0);
          const recorded = recordedHeads(layer, n, { first: tpRank * count, count });
          const where = `rank ${tpRank}, layer ${layer}, block ${n}`;
          // Recorded with TP 1. From the first all-reduce on, TP 2 sums in another order.
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
    test(`our D with TP ${tp}: full blocks equal the recording, other blocks are untouched, and P frees its blocks`, async () => {
      const before = await expired(server());
      const { decode, asked, before: used } = await received({ tp });
      expectRecorded(decode, tp);
      await untilFreed(server(), used);
      expect(await expired(server())).toBe(before);
      decode.finish(asked, [OUR_BLOCKS]);
      expect(decode.outstanding()).toMatchObject(NOTHING);
    });
  }

  test("D registers before the prefill: P writes the blocks after it", async ({ skip }) => {
    if (server().kind.mode === "pull") skip("in pull the prefill comes first");
    const { decode, asked: first, before } = await received({});
    decode.finish(first, [OUR_BLOCKS]);
    const { remote_engine_id, remote_host, remote_port, tp_size } = first.kvTransferParams ?? {};
    const id = freshId();
    const asked = {
      requestId: otherLegId(`cmpl-${id}-0`),
      numPromptTokens: RECORDED_TOKENS,
      kvTransferParams: {
        do_remote_prefill: true,
        do_remote_decode: false,
        transfer_mode: "push",
        remote_engine_id,
        remote_host,
        remote_port,
        tp_size,
        remote_request_id: id,
      },
    };
    forget(decode);
    const receiving = decode.receive(asked, [OUR_BLOCKS]);
    await prefill(server().url, prompt(RECORDED_TOKENS), { id });
    expect(await receiving).toEqual(RECEIVED);
    expectRecorded(decode, 1);
    await untilFreed(server(), before);
    decode.finish(asked, [OUR_BLOCKS]);
  });

  test("a prefix that D has cached is not transferred; the other blocks are", async () => {
    const { decode, asked, before } = await received({}, 2 * TINY.blockSize);
    expectRecorded(decode, 1, 2);
    await untilFreed(server(), before);
    decode.finish(asked, [OUR_BLOCKS]);
  });

  test("chunked prefill at P: the first full blocks equal the recording within rounding", async () => {
    const blocks = [...OUR_BLOCKS, 3, 1, 4, 6, 7, 8];
    const { decode, asked, before } = await received({}, 0, { tokens: 300, blocks });
    for (let layer = 0; layer < TINY.layers; layer++) {
      for (let n = 0; n < RECORDED_FULL_BLOCKS; n++) {
        const recorded = recordedHeads(layer, n, { first: 0, count: TINY.kvHeads });
        expect(largestDifference(decode.block(0, layer, blocks[n] ?? 0), recorded)).toBeLessThan(
          ROUNDING,
        );
      }
    }
    await untilFreed(server(), before);
    decode.finish(asked, [blocks]);
  });

  test("a request is aborted while D receives: both sides free its blocks", async () => {
    const { decode, asked, before } = await received({});
    decode.finish(asked, [OUR_BLOCKS]);
    await untilFreed(server(), before);
    const next = await held();
    const abort = new AbortController();
    const receiving = decode.receive(next.asked, [OUR_BLOCKS], { signal: abort.signal });
    abort.abort();
    expect((await receiving).aborted).toBe(true);
    await untilFreed(server(), before);
    expect(decode.outstanding()).toMatchObject(NOTHING);
  });

  test("heartbeats extend a lease; a lease without heartbeats expires, and P frees its blocks", async () => {
    const p = server();
    const extra = { kv_lease_duration: p.leaseSeconds };
    const { decode, asked: first, before: used } = await received({ extra });
    decode.finish(first, [OUR_BLOCKS]);
    await untilFreed(p, used);
    const before = await expired(p);
    const kept = await held();
    const { asked } = kept;
    decode.queue(asked);
    const alone = await held(70);
    await waitSeconds(p, p.leaseSeconds * BEYOND_LEASE);
    // The two prompts share their first two blocks.
    expect(await usage(p)).toBeLessThan(alone.before + 1e-9);
    expect(await expired(p)).toBe(before + 1);
    forget(decode);
    expect(await decode.receive(asked, [OUR_BLOCKS])).toEqual(RECEIVED);
    expectRecorded(decode, 1);
    await untilFreed(p, kept.before);
    expect(await expired(p)).toBe(before + 1);
    decode.finish(asked, [OUR_BLOCKS]);
  });

  test("D has the whole prompt cached, or aborts the request in its queue: P frees the blocks", async () => {
    const p = server();
    const { decode, asked: first, before } = await received({});
    decode.finish(first, [OUR_BLOCKS]);
    await untilFreed(p, before);
    const expiredBefore = await expired(p);
    const { asked: hit } = await held();
    const cached = { numComputedTokens: RECORDED_TOKENS };
    expect(await decode.receive(hit, [OUR_BLOCKS], cached)).toEqual(RECEIVED);
    decode.finish(hit, [OUR_BLOCKS]);
    // Else P may free them in the next prompt's step, and its usage would prove nothing.
    await untilFreed(p, before);
    decode.giveUpQueued((await held(70)).asked);
    await untilFreed(p, before);
    // vLLM's push has no notification for these two cases.
    expect(await expired(p)).toBe(expiredBefore + (p.kind.mode === "push" ? 2 : 0));
  });

  test("another dtype is refused before any transfer; the error names both dtypes, although P sends only a hash", async () => {
    const decode = await open({ dtype: "torch.bfloat16" });
    const { asked } = await held();
    const { failure } = await decode.receive(asked, [OUR_BLOCKS]);
    expect(failure).toMatchObject({
      code: "KV_HANDSHAKE_INCOMPATIBLE",
      failureType: server().kind.mode === "push" ? "push_reg_handshake_failed" : "handshake_failed",
    });
    expect(failure?.message).toContain('dtype is "torch.bfloat16" here and "torch.float32" there');
    expectUntouched(decode, 0, 0, OUR_BLOCKS[0] ?? 0);
  });
}

function forget(decode: HeadlessDecode) {
  for (const block of OUR_BLOCKS)
    for (let layer = 0; layer < TINY.layers; layer++) decode.block(0, layer, block).fill(UNTOUCHED);
}

function expectUntouched(
  decode: HeadlessDecode,
  tpRank: number,
  layer: number,
  block: number,
): void {
  const where = `rank ${tpRank}, layer ${layer}, block ${block}`;
  expect(
    decode.block(tpRank, layer, block).every((byte) => byte === UNTOUCHED),
    where,
  ).toBe(true);
}

function largestDifference(a: Uint8Array, b: Uint8Array): number {
  const x = new Float32Array(a.slice().buffer);
  const y = new Float32Array(b.slice().buffer);
  return x.reduce((most, value, i) => Math.max(most, Math.abs(value - (y[i] ?? Number.NaN))), 0);
}
