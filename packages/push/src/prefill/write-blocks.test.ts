import { descriptorPairs, type Transfer, type TransferRequest } from "@kv/interface";
import type { RankGeometry } from "@kv/plan";
import { PUSH_CONTROL, type Registration } from "@kv/protocol";
import { listAgent, testContext, testRank, testRanks } from "@kv/testing/worker-context";
import { describe, expect, it } from "vitest";
import { consumerEngines } from "./consumer-engine.js";
import { type BlockWrite, writeBlocks } from "./write-blocks.js";

const REGIONS = [
  { name: "layers.0", memoryType: "VRAM" },
  { name: "layers.1", memoryType: "VRAM" },
  { name: "layers.2", memoryType: "DRAM" },
] as const;

const geometry = (base: number): RankGeometry =>
  testRank({
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

/** Transfers that end when the test ends them. */
async function setUp() {
  const events: string[] = [];
  const pending: (() => void)[] = [];
  const agent = listAgent({
    transfer(request: TransferRequest) {
      const { notification } = request;
      events.push(
        `WRITE of ${descriptorPairs(request).localIds.length}${notification === undefined ? "" : ", notified"}`,
      );
      const done = new Promise<object>((resolve) => {
        pending.push(() => resolve({}));
      });
      return { done, released: done.then(() => {}) } as unknown as Transfer;
    },
    async notify() {
      events.push("notification");
    },
  });
  const context = testContext({
    agent,
    local: geometry(2 ** 20),
    incarnation: "d",
    features: [PUSH_CONTROL],
    model: { numKvHeads: 1, groups: ["full"] },
    remote: testRanks(() => geometry(2 ** 30)),
  });
  const address = { engineId: "d", host: "d", port: 1, tpSize: 1, dcpSize: 1, ppSize: 1 };
  const { engine: consumer } = await consumerEngines(context).open(address);
  const order = {
    requestId: "p",
    wireId: "p",
    generation: 1,
    blockIds: [],
    promptBlockIds: [[1, 2]],
    numTokens: 32,
  };
  const registration = { wireId: "d1", blockIds: [[5, 6]] } as unknown as Registration;
  const write = (part: Pick<BlockWrite, "includesRegion" | "last"> = {}) =>
    writeBlocks(
      consumer,
      { registration, ranks: [0], order, ...part },
      new AbortController().signal,
      context,
    );
  const turn = async () => {
    for (let i = 0; i < 10; i++) await Promise.resolve();
  };
  return { events, pending, write, turn };
}

describe("a request's WRITEs", () => {
  it("are one for each pair of memory types, and the notification is sent when the last of them is done", async () => {
    const { events, pending, write, turn } = await setUp();
    const written = write();
    await turn();
    expect([...events].sort()).toEqual(["WRITE of 2", "WRITE of 4"]);
    pending[0]?.();
    await turn();
    expect(events).toHaveLength(2);
    pending[1]?.();
    await written;
    expect(events.at(-1)).toBe("notification");
  });

  it("move only the blocks of the regions that are included, and notify with the last write, even if it moves nothing", async () => {
    const layers = await setUp();
    const first = layers.write({ includesRegion: (region) => region === "layers.0", last: false });
    await layers.turn();
    layers.pending[0]?.();
    await first;
    expect(layers.events).toEqual(["WRITE of 2"]);
    const rest = layers.write({ includesRegion: (region) => region === "layers.2", last: true });
    await layers.turn();
    layers.pending[1]?.();
    await rest;
    expect(layers.events.slice(1)).toEqual(["WRITE of 2, notified"]);
    await layers.write({ includesRegion: () => false, last: true });
    expect(layers.events.slice(2)).toEqual(["notification"]);
  });
});
