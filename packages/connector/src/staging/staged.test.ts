import {
  type ConnectorModule,
  type FailedReceive,
  type KvCacheConfig,
  type KvCaches,
  type Platform,
  type SchedulerConnector,
  type SchedulerOptions,
  type Staging,
  silentLog,
  type Transport,
  type WorkerConnector,
  type WorkerOutput,
} from "@kv/interface";
import { engineIdentity } from "@kv/testing/engine-identity";
import { manualClock } from "@kv/testing/manual-clock";
import { leavesNothing } from "@kv/testing/nothing-left";
import { simConfig } from "@kv/testing/simulator/sim-options";
import { expect, it, vi } from "vitest";
import { readTransferConfig } from "../config/transfer-config.js";
import { noOutput } from "../worker/connector-worker.js";
import { staged } from "./staged.js";
import { stagedScheduler } from "./staged-scheduler.js";
import { StagedWorker } from "./staged-worker.js";

const request = { requestId: "r", numPromptTokens: 64, kvTransferParams: {} };

it("pool blocks are taken anew when a waiting request's hit changes in one group alone", () => {
  const inner: Partial<SchedulerConnector> = {
    matchedTokens: () => ({ tokens: 32, async: true }),
    requestFinished: () => ({ keepBlocks: false }),
    outstanding: () => ({}),
  };
  const [group] = simConfig(16).groups;
  const cache = { ...simConfig(16), groups: [group, group] } as KvCacheConfig;
  const scheduler = stagedScheduler(inner as SchedulerConnector, cache, 16);
  leavesNothing(
    () => scheduler.outstanding(),
    () => void scheduler.requestFinished(request, [[], []], "aborted"),
  );
  for (const [byGroup, blocks] of [
    [[32, 0], 6],
    [[32, 32], 4],
    [[0, 32], 6],
  ] as const) {
    scheduler.matchedTokens(request, 32, byGroup);
    expect(scheduler.outstanding().stagedBlocks).toBe(blocks);
  }
});

it("work is pending while a step has orders for the copies, or the connector has work", () => {
  let isPending = false;
  const ended = vi.fn(() => ({ keepBlocks: false }));
  const inner: Partial<SchedulerConnector> = {
    matchedTokens: () => ({ tokens: 32, async: true }),
    afterAllocation() {},
    requestFinished: ended,
    buildStepMetadata: () => ({ connector: "inner", step: 1 }),
    hasPendingWork: () => isPending,
    outstanding: () => ({}),
  };
  const scheduler = stagedScheduler(inner as SchedulerConnector, simConfig(16), 16);
  leavesNothing(() => scheduler.outstanding());
  const steps: boolean[] = [];
  const step = () => {
    steps.push(scheduler.hasPendingWork());
    const { staging } = scheduler.buildStepMetadata();
    expect(scheduler.hasPendingWork()).toBe(false);
    return staging;
  };
  const produced = { ...request, requestId: "p", kvTransferParams: { do_remote_decode: true } };
  scheduler.afterAllocation(produced, [[1, 2, 3, 4]], 0);
  expect(step()).toMatchObject({ saves: [{ requestId: "p" }], loads: [] });
  scheduler.afterAllocation(request, [[1, 2]], 32);
  expect(step()).toMatchObject({ saves: [], loads: [{ requestId: "r", numTokens: 32 }] });
  for (const each of [produced, request]) scheduler.requestFinished(each, [[1]], "aborted");
  expect(step()).toMatchObject({ over: ["p", "r"] });
  isPending = true;
  expect([...steps, scheduler.hasPendingWork()]).toEqual([true, true, true, true]);
  scheduler.requestFinished(request, [[1]], "aborted");
  expect(ended).toHaveBeenLastCalledWith(request, [[]], "aborted");
});

/** A worker that has received `r`, whose copy to the device ends when the test says. */
async function loading(unverifiedReceiving: string[] = []) {
  const done: string[] = [];
  const gates: (() => void)[] = [];
  let landed: WorkerOutput = noOutput();
  const inner: Partial<WorkerConnector> = {
    name: "inner",
    onProgress() {},
    startLoad() {},
    registerKvCaches: async () => {},
    outstanding: () => ({}),
    collectFinished() {
      const output = landed;
      landed = noOutput();
      return output;
    },
    close: async () => void done.push("inner closed"),
  };
  const staging: Partial<Staging> = {
    load: () => new Promise((resolve) => gates.push(resolve)),
    close: async () => void done.push("staging closed"),
  };
  const platform = { createStaging: async () => staging as Staging } as Partial<Platform>;
  const worker = new StagedWorker(inner as WorkerConnector, {
    platform: platform as Platform,
    transport: {} as Transport,
    poolBlocks: 4,
    clock: manualClock(),
    log: silentLog,
    tracer: undefined,
  });
  await worker.registerKvCaches({ config: simConfig(16), regions: [] } as KvCaches);
  const step = (staged: object) =>
    worker.startLoad({
      connector: "inner",
      step: 1,
      staging: { saves: [], saved: [], loads: [], over: [], ...staged },
    });
  step({ loads: [{ requestId: "r", numTokens: 16, device: [[3]], wire: [[1]] }] });
  landed = { ...noOutput(), finishedReceiving: ["r"], unverifiedReceiving };
  expect(worker.collectFinished().finishedReceiving).toEqual([]);
  worker.onProgress(() => void done.push("progress"));
  leavesNothing(
    () => worker.outstanding(),
    () => step({ over: ["r"] }),
  );
  const land = (output: Partial<WorkerOutput>) => {
    landed = { ...noOutput(), ...output };
  };
  return { worker, done, land, finish: () => gates.splice(0).map((resolve) => resolve()) };
}

it("a request is reported when its KV is on the device, once", async () => {
  const { worker, done, finish } = await loading(["r"]);
  expect(worker.outstanding()).toMatchObject({ loads: 1, loading: 1 });
  finish();
  await new Promise((resolve) => void setImmediate(resolve));
  expect(done).toEqual(["progress"]);
  expect(worker.collectFinished()).toMatchObject({
    finishedReceiving: ["r"],
    unverifiedReceiving: ["r"],
  });
  expect(worker.collectFinished().finishedReceiving).toEqual([]);
  expect(worker.outstanding()).toMatchObject({ loads: 1, loading: 0 });
});

it("a failed receive is reported at once, with the blocks of the device", async () => {
  const { worker, done, finish, land } = await loading();
  finish();
  await new Promise((resolve) => void setImmediate(resolve));
  worker.collectFinished();
  const failed = { requestId: "r", code: "KV_TRANSFER_FAILED", message: "", failureType: "x" };
  const failure = { ...failed, blockIds: [1, 9] } as FailedReceive;
  land({ finishedReceiving: ["r"], failedReceiving: [failure], failedBlockIds: [1] });
  expect(worker.collectFinished()).toMatchObject({
    finishedReceiving: ["r"],
    failedReceiving: [{ ...failed, blockIds: [3] }],
    failedBlockIds: [3],
  });
  expect(done).toEqual(["progress"]);
});

it("the pool closes after the copies that run, and after the transport has forgotten it", async () => {
  const { worker, done, finish } = await loading();
  const closed = worker.close();
  await new Promise((resolve) => void setImmediate(resolve));
  expect(done).toEqual(["inner closed"]);
  finish();
  await closed;
  expect(done).toEqual(["inner closed", "progress", "staging closed"]);
});

it.each([{ saves: [], saved: [], loads: [] }, "x", null])(
  "a step that has something else than orders for the copies is refused: %j",
  async (staging) => {
    const { worker, finish } = await loading();
    const step = { connector: "inner", step: 7, staging };
    expect(() => worker.startLoad(step)).toThrow(
      'step 7: its metadata has something else under "staging"',
    );
    finish();
  },
);

it("a platform without staging is refused", () => {
  const platform = { deviceType: "cpu" } as Platform;
  expect(() => staged({ name: "inner" } as ConnectorModule, { platform, poolBlocks: 4 })).toThrow(
    "platform cpu has no staging",
  );
});

it.each<[string, object, Parameters<typeof engineIdentity>[1], RegExp]>([
  ["a readback", { bidirectional_kv_xfer: true }, {}, /bidirectional_kv_xfer/],
  ["ranks that share a sequence", {}, { tpSize: 2, dcpSize: 2 }, /holds whole sequences/],
  ["layer-wise push", { push_layerwise: true }, {}, /after the forward pass/],
])("a staged cache refuses %s with the reason", async (_, extra, sizes, message) => {
  const platform = { createStaging: () => {} } as unknown as Platform;
  const module = staged({ name: "inner" } as ConnectorModule, { platform, poolBlocks: 4 });
  const config = readTransferConfig({
    kv_connector: "NixlConnector",
    kv_role: "kv_producer",
    kv_connector_extra_config: { ...extra },
  });
  const options = { config, engine: engineIdentity("e", sizes) } as SchedulerOptions;
  await expect(module.createScheduler(options)).rejects.toMatchObject({
    code: "KV_PLATFORM_UNSUPPORTED",
    message: expect.stringMatching(message) as string,
  });
});
