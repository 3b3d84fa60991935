import type {
  PendingReceive,
  RemoteEngine,
  RemoteEngines,
  WorkerContext,
} from "@kv/connector/building-blocks";
import { KvError, silentLog, type Transfer, type TransferResult } from "@kv/interface";
import type { LeaseReply } from "@kv/protocol";
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
  seenAtMs: 0,
} as unknown as ReceiveOrder;

function setUp({
  lists = [{ local: {}, remote: {} }] as unknown[],
  queryLease = async (): Promise<LeaseReply> => ({ held: true, incarnation: "i" }),
} = {}) {
  const held: string[] = [];
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
  } as unknown as WorkerContext;
  const engines = {
    acquire: async () => ({ engine, release() {} }),
    queryLease,
    drop() {},
  } as unknown as RemoteEngines;
  const receiver = new PullReceiver({
    context,
    engines,
    heartbeats: { takenAtMs: () => [] },
    releases: { hold: ({ requestId }) => void held.push(requestId) },
  });
  const receive = { order, signal: new AbortController().signal } as unknown as PendingReceive<ReceiveOrder>;
  return { held, receive: () => receiver.receive(receive).then(() => receive.isVerified) };
}

test("a request is received, and its P is held open until the release", async () => {
  const { receive, held } = setUp();
  expect(await receive()).toBe(false);
  expect(held).toEqual([order.remote.requestId]);
});

test("a READ whose lists were not prepared fails the request, and its P is held open until the release", async () => {
  const { receive, held } = setUp({ lists: [undefined] });
  await expect(receive()).rejects.toMatchObject({
    failureType: "transfer_setup_failed",
    error: { code: "KV_INTERNAL" },
  });
  expect(held).toEqual([order.remote.requestId]);
});

test("a request is verified when P has compared the prompts, and refused when they differ", async () => {
  const same = setUp({ queryLease: async () => ({ held: true, incarnation: "i", prompt: "same" }) });
  expect(await same.receive()).toBe(true);
  const differs = setUp({ queryLease: async () => ({ held: false, incarnation: "i", prompt: "differs" }) });
  await expect(differs.receive()).rejects.toMatchObject({
    failureType: "prompt_mismatch",
    error: { code: "KV_PROMPT_MISMATCH" },
  });
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
