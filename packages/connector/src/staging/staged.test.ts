import {
  type ConnectorModule,
  type EngineIdentity,
  type KvCacheConfig,
  type KvCaches,
  type Platform,
  type SchedulerConnector,
  type SchedulerOptions,
  type Staging,
  silentLog,
  type Transport,
  type WorkerConnector,
} from "@kv/interface";
import { engineIdentity } from "@kv/testing/engine-identity";
import { manualClock } from "@kv/testing/manual-clock";
import { leavesNothing } from "@kv/testing/nothing-left";
import { simConfig } from "@kv/testing/simulator/sim-config";
import { expect, it } from "vitest";
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

/** A worker that has received `r`, whose copy to the device ends when the test says. */
async function loading() {
  const done: string[] = [];
  const gates: (() => void)[] = [];
  let landed = noOutput();
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
  landed = { ...noOutput(), finishedReceiving: ["r"] };
  expect(worker.collectFinished().finishedReceiving).toEqual([]);
  leavesNothing(
    () => worker.outstanding(),
    () => step({ over: ["r"] }),
  );
  return { worker, done, finish: () => gates.splice(0).map((resolve) => resolve()) };
}

it("a request is reported when its KV is on the device, once", async () => {
  const { worker, finish } = await loading();
  expect(worker.outstanding()).toMatchObject({ loads: 1, loading: 1 });
  finish();
  await new Promise((resolve) => void setImmediate(resolve));
  expect(worker.collectFinished().finishedReceiving).toEqual(["r"]);
  expect(worker.collectFinished().finishedReceiving).toEqual([]);
  expect(worker.outstanding()).toMatchObject({ loads: 1, loading: 0 });
});

it("the pool closes after the copies that run, and after the transport has forgotten it", async () => {
  const { worker, done, finish } = await loading();
  const closed = worker.close();
  await new Promise((resolve) => void setImmediate(resolve));
  expect(done).toEqual(["inner closed"]);
  finish();
  await closed;
  expect(done).toEqual(["inner closed", "staging closed"]);
});

it.each<[string, object, Partial<EngineIdentity>, RegExp]>([
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
