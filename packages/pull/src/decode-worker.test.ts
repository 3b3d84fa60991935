import { METRICS, memoryMetrics } from "@kv/connector";
import {
  KvError,
  type SideChannel,
  silentLog,
  type Transfer,
  type TransferResult,
} from "@kv/interface";
import { encodeLeaseReply, type LeaseReply } from "@kv/protocol";
import { manualClock } from "@kv/testing/manual-clock";
import { leavesNothing } from "@kv/testing/nothing-left";
import { listAgent, testContext, testRank, testRanks } from "@kv/testing/worker-context";
import { describe, expect, it, test } from "vitest";
import { TransferMetrics } from "../../connector/src/peers/transfers.js";
import { DecodeWorker, leaseDeadlineMs } from "./decode-worker.js";
import type { PullStepMetadata, ReceiveOrder } from "./step-metadata.js";

const remote = {
  engineId: "p",
  host: "p",
  port: 5600,
  tpSize: 1,
  dcpSize: 1,
  ppSize: 1,
  requestId: "wire-r",
  blockIds: [[1]],
};
const order: ReceiveOrder = {
  requestId: "r",
  remote,
  localBlockIds: [[1]],
  localComputedBlocks: [0],
  seenAtMs: 0,
};

/** A rank of D that reads from the process `i` of P. */
function setUp({
  prepared = true,
  answer = async (): Promise<LeaseReply> => ({ held: true, incarnation: "i" }),
  isPlain = false,
  isReached = true,
  takesNotifications = true,
} = {}) {
  const clock = manualClock();
  const counters = memoryMetrics();
  const warned: string[] = [];
  const notified: string[] = [];
  let handshakes = 0;
  const agent = listAgent({
    transfer: (): Transfer => ({
      done: Promise.resolve({} as TransferResult),
      released: Promise.resolve(),
    }),
    async notify(_, payload) {
      if (!takesNotifications) throw new KvError("KV_NOTIFICATION_FAILED", "no");
      notified.push(new TextDecoder().decode(payload));
    },
  });
  const context = {
    ...testContext({
      agent,
      clock,
      local: testRank(),
      incarnation: isPlain ? undefined : "i",
      extra: { engine_ttl: 1 },
      remote(tpRanks) {
        handshakes += 1;
        if (!isReached) throw new KvError("KV_SIDE_CHANNEL_UNREACHABLE", "nobody is there");
        return testRanks(() => testRank())(tpRanks);
      },
    }),
    caches: { config: { groups: [{}] }, regions: [] } as never,
    log: { ...silentLog, warn: (event: string) => void warned.push(event) },
    metrics: new TransferMetrics(counters),
    sideChannel: {
      request: async () => ({
        frames: [encodeLeaseReply(await answer())],
        sentAtMs: 0,
        receivedAtMs: 0,
      }),
    } as Partial<SideChannel> as SideChannel,
  };
  const worker = new DecodeWorker(context);
  const { engines } = worker;
  const acquire = engines.acquire.bind(engines);
  engines.acquire = async (...given) => {
    const { engine, release } = await acquire(...given);
    return { engine: prepared ? engine : { ...engine, sources: [] }, release };
  };
  const step = async (orders: Partial<PullStepMetadata>) => {
    const none = { receives: [], releases: [], aborts: [], heartbeats: [], schedulerClockMs: 0 };
    worker.step({ ...none, ...orders } as unknown as PullStepMetadata);
    for (let i = 0; i < 200; i++) await Promise.resolve();
    return context.output.take();
  };
  leavesNothing(
    () => ({
      ...worker.outstanding(),
      ...engines.outstanding(),
      timers: clock.pending(),
      lateCloses: warned.filter((event) => event === "close-did-not-wait").length,
    }),
    async () => {
      clock.advance(1_000_000);
      await worker.close();
      await engines.close();
    },
  );
  const counted = (name: keyof typeof METRICS) => counters.total(METRICS[name]);
  return { clock, step, worker, notified, counted, warned, handshakes: () => handshakes };
}

/**
 * Receives the request. P is still open after `engine_ttl`, and is notified when the blocks are
 * released.
 */
async function received(given: Parameters<typeof setUp>[0], change: Partial<ReceiveOrder> = {}) {
  const { clock, step, worker, notified, counted, handshakes } = setUp(given);
  const output = await step({ receives: [{ ...order, ...change }] });
  const rest = { receives: 0, notifications: 0, heartbeats: 0 };
  expect(worker.outstanding()).toEqual({ ...rest, unreleased: 1 });
  clock.advance(2000);
  expect(notified).toEqual([]);
  await step({ releases: [remote] });
  expect([notified, handshakes()]).toEqual([["wire-r:1"], 1]);
  return { ...output, expired: counted("expiredRequests") };
}

const answers = (reply: Partial<LeaseReply>) => ({
  answer: async () => ({ held: true, incarnation: "i", ...reply }),
});
test.each<[string, Partial<LeaseReply>, string[] | undefined]>([
  ["that P does not compare", {}, ["r"]],
  ["that P has compared", { prompt: "same" }, undefined],
])(
  "a request of a prompt %s is received, and its P is held open until the release",
  async (_, reply, unverified) => {
    const output = await received(answers(reply));
    expect(output).toMatchObject({ finishedReceiving: ["r"], failedReceiving: [], expired: 0 });
    expect(output.unverifiedReceiving).toEqual(unverified);
  },
);

test.each<[string, ...Parameters<typeof received>, KvError["code"], failureType: string]>([
  ["lists are not prepared", { prepared: false }, {}, "KV_INTERNAL", "transfer_setup_failed"],
  [
    "blocks are of more groups",
    {},
    { localBlockIds: [[1], [1]] },
    "KV_BLOCKS_MISMATCH",
    "transfer_setup_failed",
  ],
  [
    "prompt differs",
    answers({ held: false, prompt: "differs" }),
    {},
    "KV_PROMPT_MISMATCH",
    "prompt_mismatch",
  ],
  [
    "lease query fails",
    { answer: () => Promise.reject(new KvError("KV_SIDE_CHANNEL_TIMEOUT", "no answer")) },
    {},
    "KV_SIDE_CHANNEL_UNREACHABLE",
    "lease_query_failed",
  ],
  ["blocks P no longer holds", answers({ held: false }), {}, "KV_LEASE_EXPIRED", "lease_expired"],
  [
    "blocks another process of P holds under that name",
    answers({ incarnation: "another" }),
    {},
    "KV_LEASE_EXPIRED",
    "lease_expired",
  ],
])(
  "a request whose %s fails, and its P is held open until the release",
  async (_, given, change, code, failureType) => {
    expect(await received(given, change)).toMatchObject({
      failedReceiving: [expect.objectContaining({ requestId: "r", code, failureType })],
      expired: failureType === "lease_expired" ? 1 : 0,
    });
  },
);

test.each([
  ["cannot be reached", { isReached: false }],
  ["takes no notification", { takesNotifications: false }],
])("a P that %s is not told of the release, which is counted", async (_, given) => {
  const { step, counted, warned } = setUp(given);
  await step({ releases: [remote] });
  expect([counted("failedNotifications"), warned.at(-1)]).toEqual([1, "notification_failed"]);
});

test("two uses of one id, which their capabilities distinguish, hold P open one by one", async () => {
  const { clock, step, notified, handshakes } = setUp();
  const uses = ["first", "second"].map((capability, at) => ({
    ...remote,
    lease: { incarnation: "i", generation: at, capability },
  }));
  await step({
    receives: uses.map((use, at) => ({ ...order, requestId: `r${at}`, remote: use })),
  });
  for (const [at, use] of uses.entries()) {
    clock.advance(2000);
    await step({ releases: [use] });
    expect([notified.length, handshakes()]).toEqual([at + 1, 1]);
  }
});

test.each([
  ["less than", 1_024_999, []],
  ["as long as", 1_025_000, ["KV_LEASE_EXPIRED"]],
])(
  "a plain P's lease began when the scheduler saw the request, %s a lease and its margin ago by the scheduler's own clock, and what is held is released at the end",
  async (_, schedulerClockMs, codes) => {
    const { step } = setUp({ isPlain: true });
    const receives = [{ ...order, seenAtMs: 1_000_000 }];
    const { failedReceiving } = await step({ receives, schedulerClockMs });
    expect(failedReceiving.map(({ code }) => code)).toEqual(codes);
  },
);

describe("leaseDeadlineMs", () => {
  const settings = { leaseMs: 30_000, extensionMs: 20_000, leaseMarginMs: 5000 };
  const engine = { clock: { earliestLocalMs: (seconds: number) => seconds * 1000 - 100_000 } };

  it.each<
    [string, expirySeconds: number | undefined, heartbeatsAtMs: number[], deadlineMs: number]
  >([
    ["converts the announced expiry with the clock offset, less the margin", 130, [], 25_000],
    ["counts a lease from when the request was first seen", undefined, [], 27_000],
    ["a heartbeat extends it", 130, [20_000], 35_000],
    ["a heartbeat never shortens it", 130, [5000], 25_000],
    ["several heartbeats extend it", 130, [5000, 24_000, 38_000, 52_000], 67_000],
    ["a heartbeat after it does not extend it", 130, [25_001], 25_000],
    ["a heartbeat after an extended one does not", 130, [20_000, 36_000, 37_000], 35_000],
  ])("%s", (_, expirySeconds, heartbeatsAtMs, deadlineMs) => {
    const order = { remote: { expirySeconds }, seenAtMs: 2000 };
    expect(leaseDeadlineMs(order, engine, settings, heartbeatsAtMs)).toBe(deadlineMs);
  });
});
