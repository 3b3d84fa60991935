import { KvError, type SideChannel, type Transfer, type TransferResult } from "@kv/interface";
import { encodeLeaseReply, type LeaseReply } from "@kv/protocol";
import { manualClock } from "@kv/testing/manual-clock";
import { leavesNothing } from "@kv/testing/nothing-left";
import { listAgent, testContext, testRank, testRanks } from "@kv/testing/worker-context";
import { describe, expect, it, test } from "vitest";
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
} = {}) {
  const clock = manualClock();
  const notified: string[] = [];
  let handshakes = 0;
  const agent = listAgent({
    transfer: (): Transfer => ({
      done: Promise.resolve({} as TransferResult),
      released: Promise.resolve(),
    }),
    notify: async (_, payload) => void notified.push(new TextDecoder().decode(payload)),
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
        return testRanks(() => testRank())(tpRanks);
      },
    }),
    caches: { config: { groups: [{}] }, regions: [] } as never,
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
    () => ({ ...worker.outstanding(), ...engines.outstanding(), timers: clock.pending() }),
    async () => {
      clock.advance(1_000_000);
      await worker.close();
      await engines.close();
    },
  );
  return { clock, step, notified, handshakes: () => handshakes };
}

/**
 * Receives the request. P is still open after `engine_ttl`, and is notified when the blocks are
 * released.
 */
async function received(given: Parameters<typeof setUp>[0]) {
  const { clock, step, notified, handshakes } = setUp(given);
  const output = await step({ receives: [order] });
  clock.advance(2000);
  expect(notified).toEqual([]);
  await step({ releases: [remote] });
  expect([notified, handshakes()]).toEqual([["wire-r:1"], 1]);
  return output;
}

const failure = (code: KvError["code"], failureType: string) => ({
  failedReceiving: [expect.objectContaining({ requestId: "r", code, failureType })],
});

test("a request is received, and its P is held open until the release", async () => {
  const output = await received({});
  expect(output).toMatchObject({
    finishedReceiving: ["r"],
    unverifiedReceiving: ["r"],
    failedReceiving: [],
  });
});

test("a READ whose lists were not prepared fails the request, and its P is held open until the release", async () => {
  expect(await received({ prepared: false })).toMatchObject(
    failure("KV_INTERNAL", "transfer_setup_failed"),
  );
});

test("a request is verified when P has compared the prompts, and refused when they differ", async () => {
  const same = await received({
    answer: async () => ({ held: true, incarnation: "i", prompt: "same" }),
  });
  expect(same).toMatchObject({ finishedReceiving: ["r"], failedReceiving: [] });
  expect(same.unverifiedReceiving).toBeUndefined();
  const differs = await received({
    answer: async () => ({ held: false, incarnation: "i", prompt: "differs" }),
  });
  expect(differs).toMatchObject(failure("KV_PROMPT_MISMATCH", "prompt_mismatch"));
});

test("a failed lease query fails the request with lease_query_failed, not lease_expired", async () => {
  const answer = () => Promise.reject(new KvError("KV_SIDE_CHANNEL_TIMEOUT", "no answer"));
  expect(await received({ answer })).toMatchObject(
    failure("KV_SIDE_CHANNEL_UNREACHABLE", "lease_query_failed"),
  );
});

test.each([
  ["P no longer holds", { held: false, incarnation: "i" }],
  ["another process of P holds under that name", { held: true, incarnation: "another" }],
])("a request whose blocks %s fails with lease_expired", async (_, reply) => {
  expect(await received({ answer: async () => reply })).toMatchObject(
    failure("KV_LEASE_EXPIRED", "lease_expired"),
  );
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
  ["a second", 1_001_000, []],
  ["longer than a lease", 1_040_000, ["KV_LEASE_EXPIRED"]],
])(
  "a plain P's lease began when the scheduler saw the request, %s ago by the scheduler's own clock",
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
