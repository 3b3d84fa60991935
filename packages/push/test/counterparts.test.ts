import {
  createMessages,
  createOutbox,
  createPeers,
  type LeaseOrder,
  readTransferConfig,
} from "@kv/connector";
import { type Agent, type ConnectorRequest, silentLog } from "@kv/interface";
import { memoryNetwork, memorySideChannel } from "@kv/transport-memory";
import { describe, expect, it } from "vitest";
import { fixedClock } from "../../pull/test/fixed-clock.js";
import { simConfig } from "../../pull/test/sim-config.js";
import { decodeControl, decodeRegistration, type Offer } from "../src/control.js";
import { createPushScheduler } from "../src/index.js";
import type { PushStepMetadata } from "../src/step-metadata.js";
import { createWordTable } from "../src/words.js";
import type { WriteLink } from "../src/write-link.js";
import { createPushWriter } from "../src/writer.js";

// A counterpart of each unit test of vLLM's push connector (PR 35264), under what it covers there.

async function scheduler() {
  const clock = fixedClock(1000);
  const network = memoryNetwork();
  const made = createPushScheduler({
    clock,
    config: {
      ...readTransferConfig({ kv_connector: "NixlPushConnector", kv_role: "kv_both" }),
      sideChannelHost: "here",
    },
    engine: {
      engineId: "e",
      tpSize: 1,
      ppSize: 1,
      dpRank: 0,
      model: {
        model: "m",
        vllmVersion: "0.33.0",
        connectorVersion: 15,
        isHmaEnabled: false,
        speculativeConfig: null,
      },
    },
    cache: simConfig(16),
    sideChannel: memorySideChannel({ network, host: "here" }),
  });
  await made.setHandshakeMetadata([]);
  const step = () => made.buildStepMetadata() as PushStepMetadata;
  return { made, step, clock };
}

const PREFILL = {
  do_remote_prefill: true,
  remote_engine_id: "p",
  remote_request_id: "cmpl-x",
  remote_host: "p",
  remote_port: 5600,
  tp_size: 1,
};
const decodeRequest = (requestId = "d1", params: object = PREFILL): ConnectorRequest => ({
  requestId,
  numPromptTokens: 40,
  kvTransferParams: { ...params },
});
const prefillRequest = (requestId = "p1"): ConnectorRequest => ({
  requestId,
  numPromptTokens: 40,
  kvTransferParams: { do_remote_decode: true },
});
const BLOCKS = [[4, 5, 6]];

describe("scheduler", () => {
  it("decode stages a registration after allocation", async () => {
    const { made, step } = await scheduler();
    expect(made.matchedTokens(decodeRequest(), 0)).toEqual({ tokens: 40, async: true });
    made.afterAllocation(decodeRequest(), BLOCKS, 40);
    expect(step().registrations).toMatchObject([
      { requestId: "d1", localBlockIds: BLOCKS, awaited: true, host: "here" },
    ]);
  });

  it("prefill stages its blocks when the request finishes", async () => {
    const { made, step } = await scheduler();
    made.afterAllocation(prefillRequest(), BLOCKS, 0);
    expect(made.requestFinished(prefillRequest(), BLOCKS, "length").keepBlocks).toBe(true);
    expect(step().leases).toMatchObject([{ requestId: "p1", promptBlockIds: BLOCKS, numTokens: 40 }]);
  });

  it("metadata is drained on both sides", async () => {
    const { made, step } = await scheduler();
    made.matchedTokens(decodeRequest(), 0);
    made.afterAllocation(decodeRequest(), BLOCKS, 40);
    made.afterAllocation(prefillRequest(), [[1, 2, 3]], 0);
    made.requestFinished(prefillRequest(), [[1, 2, 3]], "stopped");
    const first = step();
    expect([first.registrations.length, first.leases.length, first.inBatch.length]).toEqual([1, 1, 1]);
    const second = step();
    expect([second.registrations, second.leases, second.inBatch, second.heartbeats]).toEqual([
      [],
      [],
      [],
      null,
    ]);
  });

  it("work is pending from the moment that it is staged until the workers have it", async () => {
    const { made, step } = await scheduler();
    expect(made.hasPendingWork()).toBe(false);
    made.matchedTokens(decodeRequest(), 0);
    made.afterAllocation(decodeRequest(), BLOCKS, 40);
    expect(made.hasPendingWork()).toBe(true);
    step();
    expect(made.hasPendingWork()).toBe(false);
    made.requestFinished(prefillRequest(), BLOCKS, "length");
    expect(made.hasPendingWork()).toBe(true);
    step();
    expect([made.hasPendingWork(), made.outstanding().leases]).toEqual([false, 1]);
  });

  it("a worker's output cleans up", async () => {
    const { made, step } = await scheduler();
    made.requestFinished(prefillRequest(), BLOCKS, "length");
    made.matchedTokens(decodeRequest(), 0);
    made.afterAllocation(decodeRequest(), BLOCKS, 40);
    step();
    const none = { failedReceiving: [], failedBlockIds: [] };
    made.applyWorkerOutput({ finishedSending: ["p1"], finishedReceiving: ["d1"], ...none });
    expect(made.requestFinished(decodeRequest(), BLOCKS, "stopped")).toEqual({ keepBlocks: false });
    expect(made.outstanding()).toMatchObject({ running: 0, leases: 0, requests: 0, heartbeats: 0 });
  });

  it("a registration that was not served in time: its blocks are kept as long as somebody may write", async () => {
    const { made, step } = await scheduler();
    made.matchedTokens(decodeRequest(), 0);
    made.afterAllocation(decodeRequest(), BLOCKS, 40);
    step();
    const failed = {
      requestId: "d1",
      code: "KV_REQUEST_TIMEOUT",
      message: "m",
      failureType: "push_timed_out",
    } as const;
    const output = { finishedSending: [], finishedReceiving: ["d1"], failedBlockIds: [] };
    made.applyWorkerOutput({ ...output, failedReceiving: [{ ...failed, blocksAtRisk: true }] });
    expect(made.requestFinished(decodeRequest(), BLOCKS, "error")).toEqual({ keepBlocks: true });
    made.applyWorkerOutput({ ...output, failedReceiving: [] });
    expect(made.outstanding().requests).toBe(0);
  });

  describe("does nothing", () => {
    it("without transfer parameters", async () => {
      const { made, step } = await scheduler();
      const request = { requestId: "x", numPromptTokens: 40, kvTransferParams: undefined };
      expect(made.matchedTokens(request, 0)).toEqual({ tokens: 0, async: false });
      made.afterAllocation(request, BLOCKS, 0);
      expect(made.requestFinished(request, BLOCKS, "length")).toEqual({ keepBlocks: false });
      expect(step()).toMatchObject({ registrations: [], leases: [], inBatch: [] });
    });

    it("with remote_block_ids that are none, and says so", async () => {
      const { made, step } = await scheduler();
      const request = decodeRequest("d1", { ...PREFILL, remote_block_ids: "no" });
      expect(() => made.matchedTokens(request, 0)).toThrow(/remote_block_ids/);
      // The producer is told that it may free what it has.
      expect(step().registrations).toMatchObject([{ awaited: false, localBlockIds: [] }]);
    });

    it("with no external tokens, but tells the producer", async () => {
      const { made, step } = await scheduler();
      expect(made.matchedTokens(decodeRequest(), 40)).toEqual({ tokens: 0, async: false });
      made.afterAllocation(decodeRequest(), BLOCKS, 0);
      expect(step().registrations).toMatchObject([{ awaited: false, localBlockIds: [] }]);
      expect(made.outstanding().heartbeats).toBe(0);
    });

    it.each(["aborted", "error"] as const)("for a request that is not finished (%s)", async (reason) => {
      const { made, step } = await scheduler();
      made.afterAllocation(prefillRequest(), BLOCKS, 0);
      expect(made.requestFinished(prefillRequest(), BLOCKS, reason)).toEqual({ keepBlocks: false });
      expect(step()).toMatchObject({ leases: [], notSent: ["p1"] });
    });

    it("with empty block groups", async () => {
      const { made, step } = await scheduler();
      expect(made.requestFinished(prefillRequest(), [[]], "length")).toEqual({ keepBlocks: false });
      expect(step().leases).toEqual([]);
    });

    it("with a worker's word about requests that nobody knows", async () => {
      const { made } = await scheduler();
      made.applyWorkerOutput({
        finishedSending: ["?"],
        finishedReceiving: ["?"],
        failedReceiving: [],
        failedBlockIds: [],
      });
      expect(made.outstanding()).toMatchObject({ leases: 0, requests: 0 });
    });
  });
});

function writerOn() {
  const clock = fixedClock(500);
  const outbox = createOutbox();
  const written: string[] = [];
  const told: string[] = [];
  const agent = {
    async notify(_remote: string, payload: Uint8Array) {
      told.push(new TextDecoder().decode(payload).slice(0, 4));
    },
  } as unknown as Agent;
  const nothing = () => {};
  const writer = createPushWriter({
    clock,
    log: silentLog,
    metrics: {
      transferred: nothing,
      transferFailed: nothing,
      handshakeFailed: nothing,
      notificationFailed: nothing,
      leaseExpired: nothing,
      notificationAfterExpiry: nothing,
    },
    outbox,
    messages: createMessages({ agent, log: silentLog }),
    peers: createPeers<WriteLink>({
      clock,
      log: silentLog,
      engineTtlMs: 0,
      open: async (address) => ({
        address,
        incarnation: "d-process",
        controls: true,
        targets: new Map([[0, { agent: "d agent", plan: undefined as never, lists: [] }]]),
      }),
      close: async () => {},
    }),
    engineId: "p",
    tpRank: 0,
    tpSize: 1,
    extensionMs: 20_000,
    writeTimeoutMs: 1000,
    offerMs: 5000,
    rememberMs: 60_000,
    async write(_link, ranks, { order, offer }) {
      written.push(`${order.requestId} → ${offer.wireId} [${offer.blockIds}] ranks ${ranks}`);
    },
  });
  const none = { schedulerClockMs: 500, incarnation: "p-process", inBatch: [], notSent: [], leases: [] };
  let generation = 0;
  const order = (requestId: string): LeaseOrder => {
    generation += 1;
    return {
      requestId,
      wireId: requestId,
      generation,
      blockIds: BLOCKS,
      promptBlockIds: BLOCKS,
      numTokens: 40,
      expiresAtMs: 500 + 30_000,
    };
  };
  const idle = async () => {
    for (let i = 0; i < 20; i++) await Promise.resolve();
  };
  return {
    clock,
    writer,
    written,
    told,
    idle,
    outbox,
    none,
    order,
    finish: (...ids: string[]) => writer.step({ ...none, leases: ids.map(order) }),
    register: (id: string, change: object = {}) => writer.offer(offerOf(id, change), "d agent"),
  };
}

const REGISTRATION = {
  decode_engine_id: "d",
  decode_host: "d",
  decode_port: 5600,
  decode_tp_size: 1,
  local_block_ids: [[7, 8, 9]],
  remote_engine_id: "p",
  remote_host: "p",
  remote_port: 5600,
  remote_tp_size: 1,
};
const offerOf = (request_id: string, change: object = {}): Offer =>
  decodeRegistration({ ...REGISTRATION, request_id, ...change });

describe("matching", () => {
  it("prefill finishes first", async () => {
    const { finish, register, written, idle, outbox } = writerOn();
    finish("r");
    expect(written).toEqual([]);
    register("r");
    await idle();
    expect(written).toEqual(["r → r [7,8,9] ranks 0"]);
    expect(outbox.take().finishedSending).toEqual(["r"]);
  });

  it("decode registers first", async () => {
    const { finish, register, written, idle } = writerOn();
    register("r");
    await idle();
    expect(written).toEqual([]);
    finish("r");
    await idle();
    expect(written).toEqual(["r → r [7,8,9] ranks 0"]);
  });

  it("by base id, and an exact one before it", async () => {
    const { finish, register, written, idle } = writerOn();
    register("r-0000aaaa");
    register("r-0000bbbb");
    finish("r-0000BBBB", "r-0000cccc");
    finish("s-11111111");
    register("s-11111111");
    await idle();
    expect(written).toEqual([
      "r-0000BBBB → r-0000aaaa [7,8,9] ranks 0",
      "r-0000cccc → r-0000bbbb [7,8,9] ranks 0",
      "s-11111111 → s-11111111 [7,8,9] ranks 0",
    ]);
    const exact = writerOn();
    exact.register("r-0000aaaa");
    exact.register("r-0000bbbb");
    exact.finish("r-0000bbbb");
    await exact.idle();
    expect(exact.written).toEqual(["r-0000bbbb → r-0000bbbb [7,8,9] ranks 0"]);
  });

  it.each([
    [{ request_id: 7 }],
    [{ local_block_ids: "all" }],
    [{ local_block_ids: [[]] }],
    [{ local_block_ids: [[-1]] }],
    [{ decode_host: "d:1;x" }],
    [{ decode_port: 0 }],
    [{ decode_tp_size: 0 }],
    [{ decode_engine_id: null }],
    [{ kv_peer: "x" }],
    [{ kv_peer: { rank: -1 } }],
  ])("a malformed registration is refused: %j", (change) => {
    expect(() => decodeRegistration({ ...REGISTRATION, request_id: "r", ...change })).toThrow(
      expect.objectContaining({ code: "KV_WIRE_MALFORMED" }) as Error,
    );
  });
});

describe("a step", () => {
  it("finished blocks meet a registration that waits", async () => {
    const { finish, register, written, idle, writer } = writerOn();
    register("r");
    expect(writer.outstanding().offers).toBe(1);
    finish("r");
    await idle();
    expect([written.length, writer.outstanding().offers]).toEqual([1, 0]);
  });

  it("only hands work over: no WRITE begins within it", async () => {
    const { finish, register, written, idle } = writerOn();
    register("r");
    finish("r");
    // The handshake, known or not, is never waited for in a step.
    expect(written).toEqual([]);
    await idle();
    expect(written.length).toBe(1);
  });
});

describe("notifications and leases", () => {
  it("a request whose WRITE has ended is reported as sent, once", async () => {
    const { finish, register, idle, outbox, writer } = writerOn();
    finish("r");
    register("r");
    register("r");
    await idle();
    expect(outbox.take().finishedSending).toEqual(["r"]);
    register("r");
    await idle();
    expect(outbox.take().finishedSending).toEqual([]);
    expect(writer.outstanding()).toMatchObject({ batch: 0, leases: 0, offers: 0, writes: 0 });
  });

  it("the word that a rank's share has arrived is taken, once from each rank, and an early one is kept", async () => {
    const words = createWordTable({ clock: fixedClock() });
    expect(words.done("r~1", "p agent 1")).toBe(false);
    const about = words.open("r~1");
    expect([...about.done]).toEqual(["p agent 1"]);
    const next = about.next();
    expect([words.done("r~1", "p agent 0"), words.done("r~1", "p agent 0")]).toEqual([true, true]);
    await next;
    expect([...about.done]).toEqual(["p agent 1", "p agent 0"]);
    words.close("r~1");
    expect(words.done("r~1", "p agent 0")).toBe(false);
  });

  it("a lease that ends evicts the request, and the engine is woken for it", async () => {
    const { finish, clock, outbox, writer } = writerOn();
    let woken = 0;
    outbox.onProgress(() => woken++);
    finish("r");
    clock.advance(30_001);
    expect(outbox.take().finishedSending).toEqual(["r"]);
    expect([woken, writer.outstanding().leases]).toEqual([1, 0]);
  });
});

describe("the writer is not misled", () => {
  it("by nothing to take", () => {
    const { writer, none, outbox, clock } = writerOn();
    writer.step(none);
    expect(outbox.take().finishedSending).toEqual([]);
    expect(clock.pending()).toBe(0);
  });

  it("by base ids that differ", async () => {
    const { finish, register, written, idle } = writerOn();
    finish("r-0000aaaa");
    register("q-0000aaaa");
    register("r-zzzzzzzz");
    register("r-0000aaa");
    await idle();
    expect(written).toEqual([]);
  });

  it("by a payload that is no map, or of another's type", () => {
    expect(() => decodeControl({ type: "push_withdraw" })).toThrow(/KV_WIRE|request_id|malformed/i);
    expect(() => decodeControl({ type: "push_ended", request_id: 5 })).toThrow(/request_id/);
    expect(decodeControl({ type: "of another kind" })).toBeUndefined();
  });

  it("by a request id that is no string", () => {
    expect(() => offerOf("r", { request_id: { id: "r" } })).toThrow(/request_id/);
  });

  it("by a registration that comes twice", async () => {
    const { finish, register, written, idle } = writerOn();
    register("r");
    register("r");
    finish("r");
    register("r");
    await idle();
    register("r");
    finish("other");
    await idle();
    expect(written.length).toBe(1);
  });

  it("evicting takes exactly one", () => {
    const { clock, finish, outbox, writer } = writerOn();
    finish("a");
    clock.advance(10_000);
    writer.step({ ...writerOn().none, schedulerClockMs: 500, leases: [] });
    writer.heartbeat(["a"]);
    finish("b");
    clock.advance(20_001);
    expect(outbox.take().finishedSending).toHaveLength(1);
    expect(writer.outstanding().leases).toBe(1);
  });

  it("a step with nothing to do goes on with what waits", async () => {
    const { writer, none, register, finish, idle, written } = writerOn();
    register("r");
    writer.step(none);
    writer.step(none);
    finish("r");
    await idle();
    expect(written.length).toBe(1);
  });

  it("by heartbeats, withdrawals and ends of what it does not know", async () => {
    const { writer, outbox, idle, clock } = writerOn();
    writer.heartbeat(["nobody", ""]);
    writer.withdraw(withdrawal("nobody"), "d agent");
    await idle();
    expect(outbox.take().finishedSending).toEqual([]);
    // What it keeps of them it keeps for a while.
    clock.advance(5001);
    expect(writer.outstanding().offers).toBe(0);
    expect(clock.pending()).toBe(0);
  });

  it("by an empty step: nothing is kept, no timer runs", () => {
    const { writer, none, clock } = writerOn();
    for (let i = 0; i < 10; i++) writer.step({ ...none, schedulerClockMs: i });
    expect(clock.pending()).toBe(0);
    expect(Object.values(writer.outstanding()).filter((count) => count !== 0)).toEqual([]);
  });

  it("by a registration for another engine, which is told so", async () => {
    const { register, finish, written, idle, told } = writerOn();
    finish("r");
    register("r", { remote_engine_id: "another", kv_peer: OWN });
    await idle();
    expect([written, told]).toEqual([[], ["KV1:"]]);
  });
});

const OWN = {
  match_id: "r",
  rank: 0,
  incarnation: "d-process",
  generation: 1,
  oldest_open: 1,
  num_tokens: 40,
  computed_blocks: [0],
};

const withdrawal = (request_id: string): Offer =>
  decodeRegistration(
    { ...REGISTRATION, request_id, local_block_ids: [], kv_peer: { ...OWN, match_id: request_id } },
    true,
  );

describe("generations", () => {
  it("what is older than the oldest that is open is refused, whatever else was forgotten", async () => {
    const { register, finish, written, idle, told } = writerOn();
    register("new", { kv_peer: { ...OWN, match_id: "new", generation: 9, oldest_open: 8 } });
    register("old", { kv_peer: { ...OWN, match_id: "old", generation: 7, oldest_open: 1 } });
    finish("old");
    await idle();
    expect([written, told]).toEqual([[], ["KV1:"]]);
  });

  it("a withdrawal that overtakes its registration holds", async () => {
    const { register, finish, written, idle, writer, outbox } = writerOn();
    writer.withdraw(withdrawal("r"), "d agent");
    register("r", { kv_peer: OWN });
    finish("r");
    await idle();
    expect(written).toEqual([]);
    expect(outbox.take().finishedSending).toEqual(["r"]);
  });

  it("a request of the producer's that has ended is not waited for", async () => {
    const { register, writer, none, order, idle, told } = writerOn();
    const { expiresAtMs: _, ...running } = order("r");
    writer.step({ ...none, inBatch: [running] });
    writer.step({ ...none, notSent: ["r"] });
    register("d", {
      kv_peer: {
        ...OWN,
        match_id: "d",
        prefill: { request_id: "r", incarnation: "p-process", generation: 1 },
      },
    });
    await idle();
    expect(told).toEqual(["KV1:"]);
  });
});
