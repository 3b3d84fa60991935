import type { MemoryType, PreparedList } from "@kv/interface";
import {
  buildEngineTransferPlan,
  planRequest,
  type RankGeometry,
  type ReceiveConversion,
} from "@kv/plan";
import { PUSH_CONTROL } from "@kv/protocol";
import { listAgent, testContext, testRank, testRanks } from "@kv/testing/worker-context";
import { describe, expect, it } from "vitest";
import { consumerEngines } from "./consumer-engine.js";

const rank = (tpRank: number, tpSize: number, kernelBlockSize: number, heads = 4) =>
  testRank({ tpRank, tpSize, kernelBlockSize }, heads);

interface Consumer extends Partial<Pick<RankGeometry, "attentionBackend" | "layout">> {
  readonly tpSize: number;
  readonly blockSize: number;
  readonly memoryType?: MemoryType;
  /** Its regions belong to group 0 alone. */
  readonly ownGroup?: boolean;
}

function consumerRank(tpRank: number, consumer: Consumer, heads: number): RankGeometry {
  const {
    tpSize,
    blockSize,
    attentionBackend = "SIM",
    layout = "LBHNC",
    memoryType = "DRAM",
  } = consumer;
  const sharing = consumer.ownGroup === true ? { groupIds: [0] } : {};
  const own = rank(tpRank, tpSize, blockSize, heads);
  return {
    ...own,
    attentionBackend,
    layout,
    regions: own.regions.map((region) => ({ ...region, memoryType, ...sharing })),
  };
}

function setUp(options: {
  local: RankGeometry;
  consumer: Consumer;
  heads?: number;
  features?: readonly string[] | undefined;
  announcedBlockSize?: number | undefined;
  groups?: readonly string[];
}) {
  const { local, consumer, heads = 4, announcedBlockSize, groups = ["full"] } = options;
  const open = new Set<string>();
  const list = (name: string) => {
    open.add(name);
    return { close: async () => void open.delete(name) } as unknown as PreparedList;
  };
  const agent = listAgent({
    async addRemote(metadata: Uint8Array) {
      const name = `agent ${metadata[0]}`;
      open.add(name);
      return name;
    },
    removeRemote: async (name: string) => void open.delete(name),
    prepareLocal: async () => list("local"),
    prepareRemote: async (remote: string) => list(`remote of ${remote}`),
  });
  const engines = consumerEngines(
    testContext({
      agent,
      local,
      incarnation: "i",
      features: options.features ?? [PUSH_CONTROL],
      model: { numKvHeads: heads, groups },
      extra:
        announcedBlockSize === undefined ? {} : { push_announced_block_size: announcedBlockSize },
      remote: testRanks((tpRank) => consumerRank(tpRank, consumer, heads)),
    }),
  );
  const address = {
    engineId: "d",
    host: "d",
    port: 1,
    tpSize: consumer.tpSize,
    dcpSize: 1,
    ppSize: 1,
  };
  return {
    engines,
    address,
    open,
    opened: () => engines.open(address).then(({ engine }) => engine),
  };
}

describe("consumer engines", () => {
  it("of a pipeline stage whose layers are all of one group: another stage writes the blocks of the other group", async () => {
    const own = rank(0, 1, 16);
    const regions = own.regions.map((region) => ({ ...region, groupIds: [0] }));
    const { opened } = setUp({
      local: { ...own, ppSize: 2, ppRank: 0, regions },
      consumer: { tpSize: 1, blockSize: 16, ownGroup: true },
      groups: ["full", "full"],
    });
    const plan = (await opened()).targets.get(0)?.plan;
    if (plan === undefined) throw new Error("no target");
    const blocks = { localBlockIds: [[1], [2]], remoteBlockIds: [[3], [0]], numTokens: 16 };
    const alone = planRequest(plan, { ...blocks, localBlockIds: [[1], []] });
    expect(planRequest(plan, blocks).lengthBytes).toBe(alone.lengthBytes);
    expect(alone.lengthBytes).toBeGreaterThan(0);
  });

  it("have a target for each rank that this one serves, and close all that they opened", async () => {
    const { engines, open, address } = setUp({
      local: rank(0, 1, 16),
      consumer: { tpSize: 2, blockSize: 16 },
    });
    const { engine: consumer, release } = await engines.open(address);
    expect([...consumer.targets.keys()]).toEqual([0, 1]);
    expect([...consumer.targets.values()].every(({ lists }) => lists.length === 1)).toBe(true);
    expect(open.size).toBeGreaterThan(4);
    release();
    await engines.close();
    expect([...open]).toEqual([]);
  });

  it("have nothing to write if the consumer takes the same heads from another rank", async () => {
    const local = rank(1, 4, 16, 2);
    const { opened } = setUp({ local, consumer: { tpSize: 1, blockSize: 16 }, heads: 2 });
    const consumer = await opened();
    expect(consumer.targets.get(0)?.lists).toEqual([]);
  });

  it.each<[string, Partial<Consumer>, readonly ReceiveConversion[], string]>([
    ["larger blocks, in host memory", { blockSize: 32 }, [], "permute"],
    ["larger blocks, in device memory", { blockSize: 32, memoryType: "VRAM" }, [], "direct"],
    ["blocks by token, which it converts", { layout: "LBNHC" }, ["hnd-to-nhd"], "permute"],
  ])("plan as a consumer of ours does that has %s", async (_, change, conversions, form) => {
    const local = rank(0, 1, 16);
    const consumer = { tpSize: 1, blockSize: 16, ...change };
    const { opened } = setUp({ local, consumer });
    const plan = (await opened()).targets.get(0)?.plan;
    const theirs = buildEngineTransferPlan({
      local: consumerRank(0, consumer, 4),
      remotes: [local],
      numKvHeads: 4,
      groups: ["full"],
      canPass: consumer.memoryType !== "VRAM",
      conversions,
    });
    expect([plan?.form, plan?.conversions]).toEqual([theirs.form, theirs.conversions]);
    expect(plan?.form).toBe(form);
  });

  it("leave another order inside a head to a vLLM consumer, which converts it, and refuse it for one of ours", async () => {
    const pair = {
      local: rank(0, 1, 16),
      consumer: { tpSize: 1, blockSize: 16, attentionBackend: "ANOTHER" },
    };
    const vllm = setUp({ ...pair, features: [] });
    expect((await vllm.opened()).targets.get(0)?.plan.form).toBe("copy");
    const ours = setUp(pair);
    await expect(ours.opened()).rejects.toThrow("SIM");
  });

  it.each([
    [16, 32],
    [32, 16],
    [24, 16],
  ])(
    "serve a vLLM consumer of other blocks (%i to %i) only where their size is announced, without a pass, and one of ours only where none is",
    async (from, to) => {
      const announcing = (announcedBlockSize?: number, features?: readonly string[]) =>
        setUp({
          local: rank(0, 1, from),
          consumer: { tpSize: 1, blockSize: to },
          announcedBlockSize,
          features,
        });
      const vllm = await announcing(to, []).opened();
      expect(vllm.targets.get(0)?.plan.form).toBe("direct");
      if (from !== 24) expect((await announcing().opened()).targets.size).toBe(1);
      for (const wrong of [announcing(undefined, []), announcing(64, []), announcing(to)]) {
        await expect(wrong.opened()).rejects.toMatchObject({
          code: "KV_PLAN_UNSUPPORTED",
          message: expect.stringMatching(/announces/) as string,
        });
        // It can be told why.
        expect([...wrong.open]).toEqual(["agent 0"]);
      }
    },
  );
});
