import { METRICS, memoryMetrics } from "@kv/connector";
import { KvError } from "@kv/interface";
import {
  decodeNotification,
  encodeNotification,
  encodeRegistrationEnded,
  encodeRegistrationWritten,
  PUSH_CONTROL,
} from "@kv/protocol";
import { manualClock } from "@kv/testing/manual-clock";
import { leavesNothing } from "@kv/testing/nothing-left";
import { simConfig } from "@kv/testing/simulator/sim-options";
import { listAgent, testContext, testRank, testRanks } from "@kv/testing/worker-context";
import { expect, it } from "vitest";
import { TransferMetrics } from "../../connector/src/peers/transfers.js";
import { DecodeWorker } from "./decode-worker.js";
import type { RegistrationOrder } from "./step-metadata.js";

const remote = {
  engineId: "p",
  host: "p",
  port: 5600,
  tpSize: 1,
  dcpSize: 1,
  ppSize: 1,
  requestId: "r",
  blockIds: [],
};
const order: RegistrationOrder = {
  requestId: "r",
  wireId: "r",
  secret: "s".repeat(22),
  generation: 4,
  oldestOpen: 4,
  remote,
  host: "d",
  port: 5600,
  localBlockIds: [[1]],
  localComputedBlocks: [0],
  numTokens: 16,
  promptDigest: undefined,
  isAwaited: true,
};

function setUp() {
  const clock = manualClock();
  const counters = memoryMetrics();
  const context = testContext({
    agent: listAgent({ notify: async () => {} }),
    clock,
    local: testRank(),
    incarnation: "p-process",
    features: [PUSH_CONTROL],
    remote: testRanks(() => testRank()),
    extra: { request_timeout: 5, engine_ttl: 1 },
  });
  const worker = new DecodeWorker({
    ...context,
    caches: { config: simConfig(16), regions: [] },
    metrics: new TransferMetrics(counters),
  });
  leavesNothing(
    () => ({ ...worker.outstanding(), timers: clock.pending() }),
    async () => {
      const closed = worker.close(new KvError("KV_AGENT_CLOSED", "the test ends"));
      clock.advance(10_000_000);
      await closed;
      clock.advance(10_000_000);
    },
  );
  const idle = async () => {
    for (let i = 0; i < 200; i++) await Promise.resolve();
  };
  const register = async () => {
    worker.step({
      incarnation: "d-process",
      registrations: [order],
      withdrawals: [],
      heartbeats: [],
    });
    await idle();
  };
  const unknown = () => counters.total(METRICS.notificationsAfterExpiry);
  return { worker, context, idle, register, unknown };
}

const ended = (change: object = {}) =>
  encodeRegistrationEnded({
    wireId: "r",
    incarnation: "d-process",
    generation: 4,
    secret: order.secret,
    code: "KV_PROMPT_MISMATCH",
    message: "no",
    ...change,
  });
const written = (secret: string, wireId = "r") =>
  encodeRegistrationWritten({ wireId, readers: 1, secret });
const [OTHER, REFUSED] = ["t".repeat(22), ["KV_PROMPT_MISMATCH"]];

it.each<[string, Uint8Array, finished: number, failed: string[], unknown: number]>([
  ["the end of this registration", ended(), 1, REFUSED, 0],
  ["that of another process of D", ended({ incarnation: "another" }), 0, [], 0],
  ["that of an earlier registration of the id", ended({ generation: 3 }), 0, [], 0],
  ["that of one whose secret P does not know", ended({ secret: OTHER }), 0, [], 0],
  ["that of an unknown registration", ended({ wireId: "s" }), 0, [], 0],
  ["that it is written", written(order.secret), 1, [], 0],
  ["that it is written, with another secret", written(OTHER), 0, [], 1],
  ["that another is written", written(order.secret, "s"), 0, [], 1],
  [
    "vLLM's form of an end, which proves nothing",
    encodeNotification({ kind: "push-failure", requestId: "r", readers: 1 }),
    0,
    [],
    0,
  ],
  [
    "vLLM's form of an unknown end",
    encodeNotification({ kind: "push-failure", requestId: "s", readers: 1 }),
    0,
    [],
    1,
  ],
])("P says %s", async (_, payload, finished, failed, count) => {
  const { worker, context, register, idle, unknown } = setUp();
  await register();
  expect(worker.outstanding()).toEqual({
    receives: 1,
    registered: 1,
    notifications: 0,
    heartbeats: 0,
  });
  expect(worker.notified(decodeNotification(payload), "agent 0")).toBe(true);
  await idle();
  const { finishedReceiving, failedReceiving } = context.output.take();
  expect([finishedReceiving.length, failedReceiving.map(({ code }) => code), unknown()]).toEqual([
    finished,
    failed,
    count,
  ]);
});
