import { createLocalLists, createRemoteAgents } from "@kv/connector";
import {
  type Agent,
  descriptorPairs,
  type PreparedList,
  silentLog,
  type TransferRequest,
} from "@kv/interface";
import type { RankGeometry } from "@kv/plan";
import { describe, expect, it } from "vitest";
import { type Offer, PUSH_CONTROL } from "../control.js";
import { type WritePart, writeBlocks } from "./write-blocks.js";
import { createWriteLinks } from "./consumer-link.js";

const REGIONS = [
  { name: "layers.0", memoryType: "VRAM" },
  { name: "layers.1", memoryType: "VRAM" },
  { name: "layers.2", memoryType: "DRAM" },
] as const;

const geometry = (base: number): RankGeometry => ({
  tpRank: 0,
  tpSize: 1,
  kernelBlockSize: 16,
  physicalBlocksPerLogical: 1,
  layout: "LBHNC",
  attentionBackend: "SIM",
  deviceId: 0,
  regions: REGIONS.map(({ name, memoryType }, index) => ({
    name,
    baseAddress: base + index * 65_536,
    numBlocks: 8,
    blockLengthBytes: 1024,
    blockStrideBytes: 1024,
    groupId: 0,
    memoryType,
  })),
});

/** Transfers that end when they are told to. */
async function setUp() {
  const events: string[] = [];
  const pending: (() => void)[] = [];
  const agent = {
    addRemote: async () => "d agent",
    prepareLocal: async () => ({}) as PreparedList,
    prepareRemote: async () => ({}) as PreparedList,
    transfer(request: TransferRequest) {
      const { notification } = request;
      events.push(
        `WRITE of ${descriptorPairs(request).localIds.length}${notification === undefined ? "" : " with the word"}`,
      );
      const done = new Promise<object>((resolve) => {
        pending.push(() => resolve({}));
      });
      return { done, released: done.then(() => {}) };
    },
  } as unknown as Agent;
  const links = createWriteLinks({
    agent,
    log: silentLog,
    localLists: createLocalLists(agent),
    remoteAgents: createRemoteAgents(agent),
    local: geometry(2 ** 20),
    model: { numKvHeads: 1, groups: ["full"] },
    shakeHands: async () => ({
      ranks: [{ tpRank: 0, geometry: geometry(2 ** 30), agentMetadata: new Uint8Array([0]) }],
      clock: undefined as never,
      incarnation: "d",
      features: new Set([PUSH_CONTROL]),
    }),
  });
  const link = await links.open({ engineId: "d", host: "d", port: 1, tpSize: 1, dcpSize: 1, ppSize: 1 });
  const order = {
    requestId: "p",
    wireId: "p",
    generation: 1,
    blockIds: [],
    promptBlockIds: [[1, 2]],
    numTokens: 32,
  };
  const offer = { wireId: "d1", blockIds: [[5, 6]] } as unknown as Offer;
  const write = (part?: WritePart) =>
    writeBlocks(
      link,
      [0],
      { order, offer },
      new AbortController().signal,
      {
        agent,
        messages: {
          async send() {
            events.push("the word");
            return true;
          },
        },
        tpRank: 0,
        tpSize: 1,
        transferred: () => {},
        notificationFailed: () => {},
      },
      part,
    );
  const turn = async () => {
    for (let i = 0; i < 10; i++) await Promise.resolve();
  };
  return { events, pending, write, turn };
}

describe("a request's WRITEs", () => {
  it("are one for each pair of memory types, and the word goes when the last of them is done", async () => {
    const { events, pending, write, turn } = await setUp();
    const written = write();
    await turn();
    expect([...events].sort()).toEqual(["WRITE of 2", "WRITE of 4"]);
    pending[0]?.();
    await turn();
    expect(events).toHaveLength(2);
    pending[1]?.();
    await written;
    expect(events.at(-1)).toBe("the word");
  });

  it("of some regions take their blocks alone; the last part says so, with its WRITE or without one", async () => {
    const ahead = await setUp();
    const first = ahead.write({ has: (region) => region === "layers.0", last: false });
    await ahead.turn();
    ahead.pending[0]?.();
    await first;
    expect(ahead.events).toEqual(["WRITE of 2"]);
    const rest = ahead.write({ has: (region) => region === "layers.2", last: true });
    await ahead.turn();
    ahead.pending[1]?.();
    await rest;
    expect(ahead.events.slice(1)).toEqual(["WRITE of 2 with the word"]);
    await ahead.write({ has: () => false, last: true });
    expect(ahead.events.slice(2)).toEqual(["the word"]);
  });
});
