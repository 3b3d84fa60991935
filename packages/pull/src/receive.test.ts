import type { RemoteEngine, RemoteEngines, WorkerContext } from "@kv/connector/building-blocks";
import { KvError, silentLog, type Transfer, type TransferResult } from "@kv/interface";
import { expect, test, vi } from "vitest";
import { PullReceiver } from "./receive.js";
import type { ReceiveOrder } from "./step-metadata.js";

// A plan with one READ; planning has tests of its own.
vi.mock("@kv/plan", async (original) => ({
  ...(await original<typeof import("@kv/plan")>()),
  planRequest: () => ({
    reads: [{ sourceIndex: 0, listIndex: 0, remoteRank: 0, remotePpRank: 0, descriptors: {} }],
  }),
}));

const order = {
  requestId: "r",
  remote: { engineId: "p", host: "p", port: 5600, requestId: "wire-r", blockIds: [[1]] },
  localBlockIds: [[1]],
  localComputedBlocks: [0],
  isAwaited: true,
  seenAtMs: 0,
} as unknown as ReceiveOrder;

function setUp({
  lists = [{ local: {}, remote: {} }] as unknown[],
  queryLease = async () => ({ held: true, incarnation: "i" }),
} = {}) {
  const notified: string[] = [];
  const engine = {
    address: order.remote,
    incarnation: "i",
    plan: { localConsumers: 1 },
    agents: new Map([["pp0tp0", "agent-of-p"]]),
    sources: [{ lists }],
  } as unknown as RemoteEngine;
  const done = Promise.resolve({} as TransferResult);
  const context = {
    clock: { now: () => 0 },
    log: silentLog,
    metrics: { transferred() {}, transferFailed() {} },
    caches: { regions: [] },
    settings: { leaseMs: 1, extensionMs: 1, leaseMarginMs: 1 },
    agent: { transfer: (): Transfer => ({ done, released: Promise.resolve() }) },
    notifications: { send: async (name: string) => notified.push(name) > 0 },
  } as unknown as WorkerContext;
  const engines = {
    acquire: async () => ({ peer: engine, release() {} }),
    queryLease,
    table: { drop() {} },
  } as unknown as RemoteEngines;
  const receiver = new PullReceiver({ context, engines, heartbeats: { takenAtMs: () => [] } });
  return { notified, receive: () => receiver.receive(order, new AbortController().signal) };
}

test("a request is received, and P is notified", async () => {
  const { receive, notified } = setUp();
  await receive();
  expect(notified).toEqual(["agent-of-p"]);
});

test("a READ whose lists were not prepared fails the request, and P is notified", async () => {
  const { receive, notified } = setUp({ lists: [undefined] });
  await expect(receive()).rejects.toMatchObject({
    failureType: "transfer_setup_failed",
    error: { code: "KV_INTERNAL" },
  });
  expect(notified).toEqual(["agent-of-p"]);
});

test("a failed lease query fails the request with lease_query_failed, not lease_expired", async () => {
  const { receive } = setUp({
    queryLease: () => Promise.reject(new KvError("KV_SIDE_CHANNEL_TIMEOUT", "no answer")),
  });
  await expect(receive()).rejects.toMatchObject({
    failureType: "lease_query_failed",
    error: { code: "KV_SIDE_CHANNEL_UNREACHABLE" },
  });
});

test("a request whose blocks P no longer holds fails with lease_expired", async () => {
  const { receive } = setUp({ queryLease: async () => ({ held: false, incarnation: "i" }) });
  await expect(receive()).rejects.toMatchObject({
    failureType: "lease_expired",
    error: { code: "KV_LEASE_EXPIRED" },
  });
});
