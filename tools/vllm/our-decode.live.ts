import type { FailedReceive } from "@kv/interface";
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { plain, prefill } from "./completion.js";
import { type HeadlessDecode, openHeadlessDecode, requestOf, UNTOUCHED } from "./headless-decode.js";
import { onceMoreAfterTimeout } from "./once-more.js";
import { RECORDED_FULL_BLOCKS, RECORDED_TOKENS, recordedHeads } from "./recorded-kv.js";
import { showLogs, startVllm, type VllmServer } from "./server.js";
import { prompt, TINY } from "./tiny-peer.js";
import { until } from "./until.js";

// Our decode side reads from a real vLLM prefill worker: its bytes are those that another reader recorded, and it frees its blocks.

/** Far apart and out of order, so that blocks that land in the wrong place are seen. */
const OUR_BLOCKS = [5, 2, 9, 11];
/** Longer than the tests: what is freed before is freed because we said so. */
const LEASE_SECONDS = 600;
const ROUNDING = 1e-4;

let p: VllmServer;
let d: HeadlessDecode | undefined;

afterEach(async () => {
  await d?.close();
  d = undefined;
});
beforeEach(({ onTestFailed }) => onTestFailed(() => showLogs(p)));

const usage = () => p.metric("vllm:kv_cache_usage_perc");

/** Has the peer compute a prompt and keep its blocks; answers where they are, and how much of its cache was in use before. */
async function keptPrompt() {
  const before = await usage();
  const params = await prefill(p.url, prompt(RECORDED_TOKENS));
  expect(params).toMatchObject({ tp_size: p.tp, remote_num_tokens: RECORDED_TOKENS });
  await until(async () => (await usage()) > before, "the peer keeps the blocks");
  return { params, before };
}

/** A vLLM prefill worker looks at notifications when it computes something: it is given something until it has freed its blocks. */
function freedTo(before: number): Promise<void> {
  return until(async () => {
    await plain(p.url, [20, 30], 1);
    return (await usage()) <= before;
  }, "the peer has freed the blocks");
}

function expectRecorded(decode: HeadlessDecode, tp: number): void {
  const count = TINY.kvHeads / tp;
  for (let tpRank = 0; tpRank < tp; tpRank++) {
    for (let layer = 0; layer < TINY.layers; layer++) {
      for (let n = 0; n < RECORDED_FULL_BLOCKS; n++) {
        const landed = decode.block(tpRank, layer, OUR_BLOCKS[n] ?? 0);
        const recorded = recordedHeads(layer, n, { first: tpRank * count, count });
        const where = `rank ${tpRank}, layer ${layer}, block ${n}`;
        // The recording is of a worker with TP 1. From the first all-reduce on, TP 2 adds in another order.
        if (p.tp === 1 || layer === 0) expect(Buffer.compare(landed, recorded), where).toBe(0);
        else expect(largestDifference(landed, recorded), where).toBeLessThan(ROUNDING);
      }
      for (const block of [0, 1, 3, 4, 6, 7, 8, 10, 12, 13, 14, 15]) {
        expect(decode.block(tpRank, layer, block).every((byte) => byte === UNTOUCHED)).toBe(true);
      }
    }
  }
}

/** Between two arrays of float32; values lie between -6 and 6. */
function largestDifference(a: Uint8Array, b: Uint8Array): number {
  const x = new Float32Array(a.slice().buffer);
  const y = new Float32Array(b.slice().buffer);
  return x.reduce((most, value, i) => Math.max(most, Math.abs(value - (y[i] ?? Number.NaN))), 0);
}

async function expectPulled(tp: number): Promise<void> {
  let attempts = 0;
  const { request, before } = await onceMoreAfterTimeout(async () => {
    attempts += 1;
    await d?.close();
    d = await openHeadlessDecode({ tp });
    const { params, before } = await keptPrompt();
    const request = requestOf(`pulled-${p.tp}-${tp}-${attempts}`, RECORDED_TOKENS, params);
    const { failure } = await d.receive(request, OUR_BLOCKS);
    if (failure !== undefined) throw Object.assign(new Error(failure.message), failure);
    return { request, before };
  }, timedOut);
  const decode = opened();
  expectRecorded(decode, tp);
  await freedTo(before);
  decode.finish(request, OUR_BLOCKS);
  expect(decode.outstanding()).toMatchObject({ requests: 0, heartbeats: 0, receives: 0, unreported: 0 });
}

function opened(): HeadlessDecode {
  if (d === undefined) throw new Error("there is no decode side");
  return d;
}

const timedOut = (error: unknown) => (error as FailedReceive).code === "KV_SIDE_CHANNEL_TIMEOUT";

describe("from vLLM with TP 1", () => {
  beforeAll(async () => {
    p = await startVllm({ name: "p1", extra: { kv_lease_duration: LEASE_SECONDS } });
  });
  afterAll(() => p?.stop());

  test("to our TP 1: the full blocks are those recorded, and the peer frees them", () => expectPulled(1));

  test("to our TP 2: each rank has its heads, and the peer waits for both", () => expectPulled(2));

  test("a prefix that is here already is not read: the rest lands behind it", async () => {
    d = await openHeadlessDecode();
    const { params, before } = await keptPrompt();
    const request = requestOf("prefix", RECORDED_TOKENS, params);
    const numComputedTokens = 2 * TINY.blockSize;
    expect(await d.receive(request, OUR_BLOCKS, { numComputedTokens })).toEqual({ failure: undefined });
    for (let layer = 0; layer < TINY.layers; layer++) {
      for (const block of OUR_BLOCKS.slice(0, 2)) {
        expect(d.block(0, layer, block).every((byte) => byte === UNTOUCHED)).toBe(true);
      }
      const recorded = recordedHeads(layer, 2, { first: 0, count: TINY.kvHeads });
      expect(Buffer.compare(d.block(0, layer, OUR_BLOCKS[2] ?? 0), recorded), `layer ${layer}`).toBe(0);
    }
    await freedTo(before);
    d.finish(request, OUR_BLOCKS);
  });

  test("a request given up before it was read frees the peer's blocks at once", async () => {
    d = await openHeadlessDecode();
    const { params, before } = await keptPrompt();
    d.giveUpQueued(requestOf("given-up", RECORDED_TOKENS, params));
    await freedTo(before);
  });

  test("another dtype is refused before anything is read, and the error names it though the peer sends only a digest", async () => {
    d = await openHeadlessDecode({ dtype: "torch.bfloat16" });
    const { params } = await keptPrompt();
    const { failure } = await d.receive(requestOf("other-dtype", RECORDED_TOKENS, params), OUR_BLOCKS);
    expect(failure).toMatchObject({ code: "KV_HANDSHAKE_INCOMPATIBLE", failureType: "handshake_failed" });
    expect(failure?.message).toContain('dtype is "torch.bfloat16" here and "torch.float32" there');
    expect(d.block(0, 0, OUR_BLOCKS[0] ?? 0).every((byte) => byte === UNTOUCHED)).toBe(true);
  });
});

describe("from vLLM with TP 2", () => {
  beforeAll(async () => {
    p = await startVllm({ name: "p2", tp: 2, extra: { kv_lease_duration: LEASE_SECONDS } });
  });
  afterAll(() => p?.stop());

  test("to our TP 1: the heads of both ranks come together", () => expectPulled(1));

  test("to our TP 2: each rank reads from its own", () => expectPulled(2));
});
