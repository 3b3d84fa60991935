import type {
  ConnectorModule,
  ConnectorRequest,
  SchedulerConnector,
  SchedulerOptions,
  StepMetadata,
  WorkerConnector,
  WorkerOptions,
  WorkerOutput,
} from "@kv/interface";
import { decodeMsgpack } from "@kv/protocol";
import { describe, expect, it } from "vitest";
import { dualConnector } from "./multi-connector.js";

/** What a connector with this name reports: one entry in each list. */
const output = (name: string) =>
  ({
    finishedSending: [`${name} sent`],
    finishedReceiving: [`${name} received`],
    unverifiedReceiving: [`${name} received`],
    failedReceiving: [
      { requestId: `${name} received`, code: "KV_INTERNAL", message: "", failureType: "" },
    ],
    failedBlockIds: [name.length],
  }) satisfies Required<Omit<WorkerOutput, "connectorData">>;

/** A connector that records its calls, and returns its own name. */
function named(name: string, calls: string[]): ConnectorModule {
  const note = (what: string, request: ConnectorRequest) =>
    void calls.push(`${name} ${what} ${request.requestId}`);
  return {
    name,
    createScheduler: async ({ config }: SchedulerOptions) =>
      ({
        name,
        async setHandshakeMetadata(workers) {
          calls.push(
            `${name} port ${config.sideChannelPort} payload ${workers.map(({ payload }) => payload[0])}`,
          );
        },
        requestQueued: (request) => note("queued", request),
        matchedTokens(request) {
          note("matched", request);
          return { tokens: 1, async: true };
        },
        afterAllocation: (request) => note("allocated", request),
        requestFinished(request) {
          note("finished", request);
          return { keepBlocks: request.requestId.endsWith("sent") };
        },
        buildStepMetadata: () => ({ connector: name, step: 1 }),
        applyWorkerOutput: ({ connectorData }) => void calls.push(`${name} gets ${connectorData}`),
        hasPendingWork: () => name === "push",
        outstanding: () => ({ requests: 2 }),
        close: async () => void calls.push(`${name} closed`),
      }) as Partial<SchedulerConnector> as SchedulerConnector,
    createWorker: async () =>
      ({
        name,
        handshakeMetadata: async () => ({
          tpRank: 0,
          ppRank: 0,
          payload: Uint8Array.of(name.length, name.charCodeAt(2)),
        }),
        startLoad: (step: StepMetadata) => void calls.push(`${name} loads of ${step.connector}`),
        layerComputed: ({ regions }) => void calls.push(`${name} layer ${regions}`),
        waitForSave: async (_, computed) =>
          void calls.push(`${name} saves ${JSON.stringify(computed)}`),
        close: async () => void calls.push(`${name} closed`),
        collectFinished: () => ({ ...output(name), connectorData: `data of ${name}` }),
        onProgress: () => void calls.push(`${name} listens`),
        outstanding: () => ({ leases: 3 }),
      }) as Partial<WorkerConnector> as WorkerConnector,
  };
}

async function both(port = 5600) {
  const calls: string[] = [];
  const module = dualConnector({
    name: "auto",
    pull: named("pull", calls),
    push: named("push", calls),
    prefer: ({ requestId }) => (requestId.startsWith("push") ? "push" : "pull"),
  });
  const scheduler = await module.createScheduler({
    config: { sideChannelPort: port, loadFailurePolicy: "recompute" },
  } as SchedulerOptions);
  return { calls, scheduler, worker: await module.createWorker({} as WorkerOptions) };
}
const request = (
  requestId: string,
  kvTransferParams?: Record<string, unknown>,
): ConnectorRequest => ({
  requestId,
  numPromptTokens: 1,
  kvTransferParams,
});

describe("dual connector", () => {
  it("selects the connector by transfer_mode; without one, D pulls and P uses the preferred mode", async () => {
    const { calls, scheduler } = await both();
    scheduler.requestQueued?.(
      request("push 0", { do_remote_prefill: true, transfer_mode: "push" }),
    );
    scheduler.matchedTokens(request("push 1", { do_remote_prefill: true }), 0);
    scheduler.matchedTokens(request("a", { do_remote_prefill: true, transfer_mode: "push" }), 0);
    scheduler.afterAllocation(request("push 2", { do_remote_decode: true }), [], 0);
    scheduler.requestFinished(request("b", { do_remote_decode: true }), [], "length");
    scheduler.requestFinished(request("push 3", { transfer_mode: "pull" }), [], "length");
    expect(calls).toEqual([
      "push queued push 0",
      "pull matched push 1",
      "push matched a",
      "push allocated push 2",
      "pull finished b",
      "pull finished push 3",
    ]);
  });

  it("gives each connector its own step, payload and port, and merges their reports", async () => {
    const { calls, scheduler, worker } = await both();
    worker.startLoad(scheduler.buildStepMetadata());
    worker.layerComputed?.({ regions: ["r"], computedTokens: {} });
    expect(calls.splice(0)).toEqual([
      "pull loads of pull",
      "push loads of push",
      "pull layer r",
      "push layer r",
    ]);
    const told = await worker.handshakeMetadata();
    expect(Object.keys(decodeMsgpack(told.payload, "test") as object)).toEqual(["pull", "push"]);
    await scheduler.setHandshakeMetadata([told]);
    expect(calls.splice(0)).toEqual(["pull port 5600 payload 4", "push port 5700 payload 4"]);
    for (const name of ["pull", "push"]) {
      scheduler.matchedTokens(request(`${name} received`), 0);
      scheduler.afterAllocation(request(`${name} received`), [], 1);
      scheduler.requestFinished(request(`${name} sent`), [], "length");
    }
    worker.startLoad(scheduler.buildStepMetadata());
    calls.splice(0);
    const [pulled, pushed] = [output("pull"), output("push")];
    const lists = Object.keys(pulled) as (keyof typeof pulled)[];
    const { connectorData, ...merged } = worker.collectFinished();
    expect(merged).toEqual(
      Object.fromEntries(lists.map((list) => [list, [...pulled[list], ...pushed[list]]])),
    );
    scheduler.applyWorkerOutput({ ...merged, connectorData });
    scheduler.applyWorkerOutput(merged);
    expect(calls.splice(0)).toEqual([
      "pull gets data of pull",
      "push gets data of push",
      "pull gets undefined",
      "push gets undefined",
    ]);
    worker.onProgress(() => {});
    expect(calls.splice(0)).toEqual(["pull listens", "push listens"]);
    expect(scheduler.loadFailurePolicy).toBe("recompute");
    expect([scheduler.hasPendingWork(), scheduler.outstanding(), worker.outstanding()]).toEqual([
      true,
      { requests: 4 },
      { leases: 6, loading: 0, keeping: 0 },
    ]);
    await scheduler.close();
    expect(calls).toEqual(["pull closed", "push closed"]);
  });

  it("uses port 0 for both connectors when the configured port is 0, and refuses another connector's step", async () => {
    const { calls, scheduler, worker } = await both(0);
    await scheduler.setHandshakeMetadata([]);
    expect(calls.map((call) => call.split(" ").slice(0, 3).join(" "))).toEqual([
      "pull port 0",
      "push port 0",
    ]);
    expect(() => worker.startLoad({ connector: "pull", step: 1 })).toThrow(/no metadata for pull/);
  });

  it("waitForSave passes on the numbers of computed tokens", async () => {
    const { calls, scheduler, worker } = await both();
    await worker.waitForSave(scheduler.buildStepMetadata(), { r: 16 });
    expect(calls).toEqual(['pull saves {"r":16}', 'push saves {"r":16}']);
  });

  it("closes pull's scheduler and worker when push's cannot be created", async () => {
    const calls: string[] = [];
    const failing = () => Promise.reject(new Error("port taken"));
    const module = dualConnector({
      name: "auto",
      pull: named("pull", calls),
      push: { name: "push", createScheduler: failing, createWorker: failing },
      prefer: () => "pull",
    });
    const options = { config: { sideChannelPort: 1 } } as SchedulerOptions;
    await expect(module.createScheduler(options)).rejects.toThrow("port taken");
    await expect(module.createWorker({} as WorkerOptions)).rejects.toThrow("port taken");
    expect(calls).toEqual(["pull closed", "pull closed"]);
  });
});
