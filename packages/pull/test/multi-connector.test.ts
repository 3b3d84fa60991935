import { multiConnector, registerConnector } from "@kv/connector";
import { delegateTo } from "@kv/connector/building-blocks";
import {
  type ConnectorModule,
  KvError,
  type SchedulerConnector,
  type SchedulerOptions,
  type WorkerConnector,
} from "@kv/interface";
import { createScenario, prompt } from "@kv/testing/scenarios/scenario";
import { expect, it } from "vitest";
import { pullConnector } from "../src/index.js";
import shelfConnector, { state } from "./support/shelf-connector.mjs";

// A program would name its package in `kv_connector_module_path`.
const SHELF = { kv_connector: "ShelfOfTheMultiConnectorTest", kv_role: "kv_both" };
const PULL = { kv_connector: "PullOfTheMultiConnectorTest", kv_role: "kv_both" };
/** Of whole blocks. */
const WHOLE = prompt(1, 48);
registerConnector(SHELF.kv_connector, async () => shelfConnector);
registerConnector(PULL.kv_connector, async () => pullConnector);

it("the first connector that has the prompt loads it, all save it, and blocks are free when the last one has", async () => {
  await using play = createScenario({ connector: multiConnector });
  const extra = { connectors: [PULL, SHELF] };
  const { p, d } = await play.pair({ extra }, { extra });
  const params = await play.prefilled(p, 1, WHOLE);
  await play.clock.advance(100);
  // The shelf has saved them. The reader has not come.
  expect(p.outstanding().kept).toBe(1);
  expect(await play.decoded(d, params, 1, WHOLE)).toBe("ok");
  expect(state.loaded).toEqual([]);
  await play.clock.advance(100);
  expect([p.outstanding().kept, d.outstanding().kept]).toEqual([0, 0]);
  // No P has this one: D's own shelf does.
  expect(await play.outcome(d.decode({ ...WHOLE, requestId: "again", params: {} }))).toBe("ok");
  expect(state.loaded).toEqual(["d again"]);
  // Both have it: the first one loads.
  const second = await play.clock.settle(p.prefill({ ...WHOLE, requestId: "second" }));
  expect(state.loaded).toEqual(["d again", "p second"]);
  expect(await play.outcome(d.decode({ ...WHOLE, requestId: "third", params: second }))).toBe("ok");
  expect(state.loaded).toHaveLength(2);
});

it.each([
  ["received", { finishedReceiving: ["r1"] }],
  [
    "failed",
    {
      finishedReceiving: ["r1"],
      failedReceiving: [
        { requestId: "r1", code: "KV_INTERNAL", message: "", failureType: "", blocksAtRisk: true },
      ],
    },
  ],
  ["unverified", { finishedReceiving: ["r1"], unverifiedReceiving: ["r1"] }],
  ["sent", { finishedSending: ["r1"] }],
] as const)(
  "H4: a connector that loads and keeps nothing names a request that another one does, as %s: nothing follows from it",
  async (what, said) => {
    const liar = delegateTo(shelfConnector as ConnectorModule, {
      async createWorker(options) {
        const worker = await shelfConnector.createWorker(options);
        const collectFinished = () => ({ ...worker.collectFinished(), ...said });
        return delegateTo(worker as WorkerConnector, { collectFinished });
      },
      async createScheduler(options) {
        const scheduler = shelfConnector.createScheduler(options);
        const nothing = { tokens: 0, async: false };
        return delegateTo(scheduler as SchedulerConnector, {
          matchedTokens: () => nothing,
          requestFinished: () => ({ keepBlocks: false }),
        });
      },
    });
    registerConnector(`LiarThatSays${what}`, async () => liar);
    const extra = {
      connectors: [{ kv_connector: `LiarThatSays${what}`, kv_role: "kv_both" }, PULL],
    };
    await using play = createScenario({ connector: multiConnector });
    const verified: boolean[] = [];
    const received = (_requestId: string, isVerified: boolean) => void verified.push(isVerified);
    const { p, d } = await play.pair({ extra }, { extra, received });
    const params = await play.prefilled(p, 1, WHOLE);
    await play.clock.advance(100);
    expect(p.outstanding().kept).toBe(1);
    expect(await play.decoded(d, params, 1, WHOLE)).toBe("ok");
    expect(verified).toEqual([true]);
    await play.clock.advance(100);
    expect([p.outstanding().kept, d.outstanding().kept]).toEqual([0, 0]);
  },
);

it("sleeps where all its connectors can", async () => {
  await using play = createScenario({ connector: multiConnector });
  const { p, d } = await play.pair(
    { extra: { connectors: [PULL] } },
    { extra: { connectors: [PULL] } },
  );
  expect(await play.handedOver(p, d, 1)).toBe("ok");
  await play.clock.settle(p.sleep());
  await play.clock.settle(p.wakeUp());
  expect(await play.handedOver(p, d, 2)).toBe("ok");
});

it.each([[undefined], [[]], ["NixlConnector"]])("refuses connectors: %j", async (connectors) => {
  const config = { extra: { connectors }, env: {} } as unknown as SchedulerOptions["config"];
  const refused = Promise.resolve(multiConnector.createScheduler({ config } as SchedulerOptions));
  const error: unknown = await refused.catch((reason: unknown) => reason);
  expect(KvError.is(error, "KV_CONFIG_INVALID") && error.message).toMatch(
    /connectors of MultiConnector/,
  );
});
