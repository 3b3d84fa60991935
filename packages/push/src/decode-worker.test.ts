import { type Agent, KvError } from "@kv/interface";
import {
  decodeNotification,
  decodePushControl,
  encodeRegistrationEnded,
  PUSH_CONTROL,
} from "@kv/protocol";
import { manualClock } from "@kv/testing/manual-clock";
import { leavesNothing } from "@kv/testing/nothing-left";
import { simConfig } from "@kv/testing/simulator/sim-config";
import { listAgent, testContext, testRank, testRanks } from "@kv/testing/worker-context";
import { expect, it } from "vitest";
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

it.each([
  ["this registration", {}, true],
  ["another process of D", { incarnation: "another" }, false],
  ["an earlier registration of the id", { generation: 3 }, false],
  ["one whose secret P does not know", { secret: "t".repeat(22) }, false],
])("P's notice that it does not write ends a request only for %s", async (_, change, ends) => {
  const clock = manualClock();
  const agent: Partial<Agent> = { notify: async () => {} };
  const context = testContext({
    agent: listAgent(agent),
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
  worker.step({
    incarnation: "d-process",
    registrations: [order],
    withdrawals: [],
    heartbeats: [],
  });
  await idle();
  const payload = encodeRegistrationEnded({
    wireId: "r",
    incarnation: "d-process",
    generation: 4,
    secret: order.secret,
    code: "KV_PROMPT_MISMATCH",
    message: "no",
    ...change,
  });
  const notification = decodeNotification(payload);
  if (notification.kind === "extension")
    expect(decodePushControl(notification.message)?.kind).toBe("ended");
  expect(worker.notified(notification, "agent 0")).toBe(true);
  await idle();
  expect(context.output.take().failedReceiving.map(({ code }) => code)).toEqual(
    ends ? ["KV_PROMPT_MISMATCH"] : [],
  );
});
