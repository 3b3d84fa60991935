import { KvError, type SideChannel, type SideChannelListenOptions, silentLog } from "@kv/interface";
import {
  decodeHandshakeRefusal,
  decodeHandshakeReply,
  decodeLeaseReply,
  encodeHandshakePayload,
  encodeHandshakeRequest,
  encodeLeaseQuery,
  encodeMsgpack,
} from "@kv/protocol";
import { engineIdentity } from "@kv/testing/engine-identity";
import { manualClock } from "@kv/testing/manual-clock";
import fc from "fast-check";
import { describe, expect, it } from "vitest";
import { connectorSettings } from "../config/connector-settings.js";
import { readTransferConfig } from "../config/transfer-config.js";
import { EngineListener } from "./engine-listener.js";

/** The listener of engine `e`, which keeps the request `kept`. */
function listenerOn(
  sideChannel: Pick<SideChannel, "listen">,
  { dpRank = 0, tpSize = 1, port = "5600", extra = {} },
) {
  const clock = manualClock(1234.5);
  const warnings: string[] = [];
  const config = readTransferConfig(
    { kv_connector: "NixlConnector", kv_role: "kv_both", kv_connector_extra_config: extra },
    { env: { VLLM_NIXL_SIDE_CHANNEL_PORT: port, VLLM_NIXL_SIDE_CHANNEL_HOST: "here" } },
  );
  const listener = new EngineListener({
    sideChannel: sideChannel as SideChannel,
    config,
    clock,
    incarnation: "process",
    log: { ...silentLog, warn: (event) => void warnings.push(event) },
    settings: connectorSettings(config),
    engine: { ...engineIdentity("e", { tpSize }), dpRank },
    holds: ({ requestId }) => ({ held: requestId === "kept" }),
  });
  return { listener, clock, warnings };
}

type Answer = (
  frames: readonly Uint8Array[],
) => Promise<readonly Uint8Array[] | undefined> | readonly Uint8Array[] | undefined;

/**
 * A side channel without a network. Tests call the `answer` functions of its listeners directly.
 */
function stubSideChannel(takenPorts: readonly number[] = []) {
  const open = new Map<number, Answer>();
  const sideChannel = {
    async listen({ host, port, answer }: SideChannelListenOptions) {
      if (takenPorts.includes(port))
        throw new KvError("KV_SIDE_CHANNEL_BIND_FAILED", `${port} is taken`);
      open.set(port, answer);
      return { host, port, close: async () => void open.delete(port) };
    },
  };
  return { sideChannel, open };
}

const payload = (name: string): Uint8Array =>
  encodeHandshakePayload({
    compatibilityHash: name,
    agentMetadataBytes: new TextEncoder().encode(name),
    rest: {},
  });
const ranks = [
  { ppRank: 0, tpRank: 0, payload: payload("rank 0") },
  { ppRank: 0, tpRank: 1, payload: payload("rank 1") },
];

async function setUp(options = {}) {
  const { sideChannel, open } = stubSideChannel();
  const { listener, clock, warnings } = listenerOn(sideChannel, options);
  const address = await listener.publish(ranks);
  const ask = async (...frames: Uint8Array[]) => open.get(address.port)?.(frames);
  return { clock, listener, address, ask, open, warnings };
}

describe("engine listener", () => {
  it("serves each rank's payload, and its clock in seconds", async () => {
    const { ask, clock } = await setUp();
    for (const tpRank of [0, 1]) {
      const frames = (await ask(encodeHandshakeRequest({ ppRank: 0, tpRank }))) ?? [];
      expect(frames.length).toBe(2);
      const { payload: got, clockSeconds } = decodeHandshakeReply(frames);
      expect(got.compatibilityHash).toBe(`rank ${tpRank}`);
      expect(clockSeconds).toBe(clock.now() / 1000);
      // The clock is a msgpack float even when it is a whole number: vLLM's msgspec refuses an
      // integer.
      expect(frames[1]?.[0]).toBe(0xcb);
    }
  });

  it("refuses an unknown rank in a one-frame reply, and keeps serving", async () => {
    const { ask, warnings } = await setUp();
    const frames = (await ask(encodeHandshakeRequest({ ppRank: 0, tpRank: 7 }))) ?? [];
    expect(decodeHandshakeRefusal(frames)).toContain("tp 7");
    expect(warnings).toEqual(["handshake-for-unknown-rank"]);
    expect(await ask(encodeHandshakeRequest({ ppRank: 0, tpRank: 0 }))).toHaveLength(2);
  });

  it.each([
    ["kept", "e", true],
    ["freed", "e", false],
    // Another engine had the address, and a request of that name.
    ["kept", "another", false],
  ])(
    "answers a lease query for request %s of engine %s: held is %s",
    async (requestId, engineId, held) => {
      const { ask } = await setUp();
      const query = {
        requestId,
        engineId,
        generation: 1,
        capability: "c".repeat(22),
        blocks: "0".repeat(64),
      };
      expect(decodeLeaseReply((await ask(encodeLeaseQuery(query))) ?? [])).toEqual({
        incarnation: "process",
        held,
        registrationGeneration: 2,
      });
    },
  );

  it("logs 50,000 malformed requests and unknown ranks in two lines per reason and ten seconds", async () => {
    const { ask, warnings, clock } = await setUp();
    const unknown = encodeHandshakeRequest({ ppRank: 0, tpRank: 7 });
    for (let n = 0; n < 25_000; n++) {
      await ask(new Uint8Array([0xc1, n & 0xff]));
      await ask(unknown);
    }
    clock.advance(10_000);
    expect(warnings.sort()).toEqual([
      "handshake-for-unknown-rank",
      "handshake-for-unknown-rank",
      "handshake-request-refused",
      "handshake-request-refused",
    ]);
  });

  it("does not answer malformed requests, and serves the next valid one", async () => {
    const { ask } = await setUp();
    const good = encodeHandshakeRequest({ ppRank: 0, tpRank: 0 });
    const near = [
      encodeMsgpack(["get_meta_msg", 0, 0]),
      encodeMsgpack([new TextEncoder().encode("get_meta_msg"), -1, 0]),
      encodeMsgpack([new TextEncoder().encode("get_meta_msg"), 0, 1.5]),
      encodeMsgpack([new TextEncoder().encode("get_meta_msg"), 0]),
      encodeMsgpack([new TextEncoder().encode("get_meta_msg"), 0, 0, 0]),
      encodeMsgpack({ kv: "lease_check" }),
      new Uint8Array(0),
      new Uint8Array(2_000_000),
      new Uint8Array(5000).fill(0x91),
    ];
    for (const frame of near) expect(await ask(frame)).toBeUndefined();
    expect(await ask()).toBeUndefined();
    expect(await ask(good, good)).toBeUndefined();
    await fc.assert(
      fc.asyncProperty(
        fc.array(fc.uint8Array({ maxLength: 80 }), { maxLength: 4 }),
        async (frames) => {
          const reply = await ask(...frames);
          expect(reply === undefined || reply.length > 0).toBe(true);
        },
      ),
      { numRuns: 500 },
    );
    // Flips each bit of a valid request: the listener may answer or not, but never throws.
    for (let bit = 0; bit < good.length * 8; bit++) {
      const flipped = good.slice();
      flipped[bit >> 3] = (flipped[bit >> 3] ?? 0) ^ (1 << (bit & 7));
      await ask(flipped);
    }
    expect(await ask(good)).toHaveLength(2);
  });

  it("counts registrations: new and changed payloads, not repeated ones", async () => {
    const { listener, address } = await setUp();
    expect(address.registrationGeneration).toBe(2);
    expect((await listener.publish(ranks)).registrationGeneration).toBe(2);
    const changed = await listener.publish([
      { ppRank: 0, tpRank: 1, payload: payload("rank 1 again") },
    ]);
    expect(changed).toEqual({ host: "here", port: 5600, registrationGeneration: 3 });
  });

  it("opens all ports or none, each serving every rank", async () => {
    const perWorker = { tpSize: 2, extra: { per_worker_ports: true } };
    const { open, listener, address } = await setUp(perWorker);
    expect([...open.keys()]).toEqual([5600, 5601]);
    expect(address.port).toBe(5600);
    const request = encodeHandshakeRequest({ ppRank: 0, tpRank: 1 });
    expect(await open.get(5601)?.([request])).toHaveLength(2);
    await listener.close();
    expect(open.size).toBe(0);
    expect(listener.listeners).toBe(0);

    const { sideChannel, open: partly } = stubSideChannel([5601]);
    const refused = listenerOn(sideChannel, perWorker).listener.publish(ranks);
    await expect(refused).rejects.toMatchObject({ code: "KV_SIDE_CHANNEL_BIND_FAILED" });
    expect(partly.size).toBe(0);
  });

  it.each([
    [{ dpRank: 0 }, [5600]],
    [{ dpRank: 2, tpSize: 4 }, [5602]],
    [{ dpRank: 2, tpSize: 2, extra: { per_worker_ports: true } }, [5604, 5605]],
    [{ dpRank: 2, tpSize: 2, port: "0", extra: { per_worker_ports: true } }, [0]],
  ])("%j listens at the host of the config and at the ports %j", async (given, ports) => {
    const { open, address } = await setUp(given);
    expect(address.host).toBe("here");
    expect([...open.keys()]).toEqual(ports);
  });
});
