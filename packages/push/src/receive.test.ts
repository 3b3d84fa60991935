import type { RemoteEngine, WorkerContext } from "@kv/connector/building-blocks";
import type { BlockIds, KvCacheConfig, KvCacheKind } from "@kv/interface";
import { buildEngineTransferPlan, exchangedBlocks, type RankGeometry } from "@kv/plan";
import { PUSH_CONTROL } from "@kv/protocol";
import { listAgent, testContext } from "@kv/testing/worker-context";
import { describe, expect, it } from "vitest";
import { planProducer, planReceive } from "./receive.js";
import type { RegistrationOrder } from "./step-metadata.js";

const CELL_BYTES = 16;
const STATE = { convProjectionBytes: [64, 32, 32], convBytes: 128, recurrentBytes: 256 };

interface Group {
  readonly kind: KvCacheKind;
  readonly slidingWindowTokens?: number;
}
const FULL: Group = { kind: "full" };
const WINDOW: Group = { kind: "swa", slidingWindowTokens: 40 };

function geometry(groups: readonly Group[], blockSize: number): RankGeometry {
  return {
    tpRank: 0,
    tpSize: 1,
    kernelBlockSize: blockSize,
    physicalBlocksPerLogical: 1,
    layout: "LBHNC",
    attentionBackend: "SIM",
    deviceId: 0,
    ...(groups.some(({ kind }) => kind === "mamba") ? { stateSpace: STATE } : {}),
    regions: groups.map(({ kind }, groupId) => {
      const bytes =
        kind === "mamba" ? STATE.convBytes + STATE.recurrentBytes : blockSize * CELL_BYTES;
      return {
        name: `layers.${groupId}`,
        baseAddress: 2 ** 20 * (groupId + 1),
        numBlocks: 64,
        blockLengthBytes: bytes,
        blockStrideBytes: bytes,
        groupId,
        memoryType: "DRAM" as const,
      };
    }),
  };
}

/** D and P with blocks of these sizes, and what D plans for a prompt. */
function pair(
  groups: readonly Group[],
  { ours = 16, theirs = 16, isPlain = false, local = {} } = {},
) {
  const config = (blockSize: number) =>
    ({
      groups: groups.map((group) => ({ ...group, layerNames: [] })),
      blockSize,
    }) as unknown as KvCacheConfig;
  const engine = {
    plan: buildEngineTransferPlan({
      local: { ...geometry(groups, ours), ...local },
      remotes: [geometry(groups, theirs)],
      numKvHeads: 1,
      groups: groups.map(({ kind }) => kind),
      canPass: true,
    }),
    address: { engineId: "p" },
    features: new Set(isPlain ? [] : [PUSH_CONTROL]),
  } as unknown as RemoteEngine;
  const tables = (blockSize: number, numTokens: number): BlockIds =>
    groups.map(({ kind }) =>
      Array.from(
        { length: kind === "mamba" ? 1 : Math.ceil(numTokens / blockSize) },
        (_, i) => i + 1,
      ),
    );
  return {
    /** The blocks of a prompt as D's scheduler registers them, and as P's parameters name them. */
    blocks(numTokens: number, computedBlocks: readonly number[] = groups.map(() => 0)) {
      return {
        numTokens,
        localComputedBlocks: computedBlocks,
        localBlockIds: exchangedBlocks(tables(ours, numTokens), config(ours), {
          numTokens,
          computedBlocks,
        }),
        remoteBlockIds: exchangedBlocks(tables(theirs, numTokens), config(theirs), { numTokens }),
      };
    },
    plan: (order: Partial<RegistrationOrder>) =>
      planReceive(engine, { requestId: "r", ...order } as RegistrationOrder, {
        caches: { config: config(ours), regions: [] },
        options: { engine: { tpSize: 1 } } as WorkerContext["options"],
      }),
    /** What D says of the engine, when it has shaken hands. */
    judged() {
      const context = testContext({
        agent: listAgent(),
        local: engine.plan.local,
        model: { numKvHeads: 1, groups: groups.map(({ kind }) => kind) },
        remote: () => [],
      });
      const ranks = [{ tpRank: 0, geometry: engine.plan.remote, agentMetadata: new Uint8Array() }];
      const { features } = engine;
      const clock = { offsetMs: 0, rttMs: 0, earliestLocalMs: (seconds: number) => seconds };
      const address = { ...engine.address, host: "p", port: 1, tpSize: 1, dcpSize: 1, ppSize: 1 };
      return planProducer(context, address, { ranks, features, clock, incarnation: undefined });
    },
  };
}

describe("before P has answered, D plans what it plans with P's answer", () => {
  it.each<[string, readonly Group[], object, number, number[]?]>([
    ["full attention", [FULL], {}, 150],
    ["full attention after a prefix hit", [FULL], {}, 150, [3]],
    ["larger blocks at D", [FULL], { ours: 32 }, 150, [1]],
    ["larger blocks at P", [FULL], { theirs: 32 }, 150, [2]],
    ["a sliding window", [WINDOW], {}, 150],
    ["a window that begins in the middle of D's larger blocks", [FULL, WINDOW], { ours: 32 }, 150],
    ["a window of larger blocks at P", [FULL, WINDOW], { theirs: 32 }, 150],
    ["a prompt that is shorter than the window", [FULL, WINDOW], { ours: 32 }, 20],
    ["a state", [FULL, { kind: "mamba" }], {}, 150],
  ])("%s", (_, groups, sizes, numTokens, computed) => {
    const { blocks, plan } = pair(groups, sizes);
    const answered = blocks(numTokens, computed);
    const { remoteBlockIds: __, ...early } = answered;
    const [told, guessed] = [plan(answered), plan(early)];
    expect(guessed.lengthBytes).toBe(told.lengthBytes);
    expect(guessed.receivePass).toEqual(told.receivePass);
    expect(told.lengthBytes).toBeGreaterThan(0);
  });
});

describe("D refuses before it registers a block", () => {
  const code = (name: string) =>
    expect.objectContaining({
      failureType: "transfer_setup_failed",
      cause: expect.objectContaining({ code: name }),
    }) as Error;

  it("an empty group at a vLLM P, which would write all of its blocks there; with a P of ours, the group is left out", () => {
    const order = { ...pair([FULL, WINDOW]).blocks(64), localBlockIds: [[1, 2, 3, 4], []] };
    const plain = () => pair([FULL, WINDOW], { isPlain: true }).plan(order);
    expect(plain).toThrow(code("KV_BLOCKS_MISMATCH"));
    expect(plain).toThrow("request r wants no block of KV cache group 1");
    expect(pair([FULL, WINDOW]).plan(order).lengthBytes).toBe(64 * CELL_BYTES);
  });

  it("unequal block sizes at a vLLM P", () => {
    const judged = () => pair([FULL], { ours: 32, isPlain: true }).judged();
    expect(judged).toThrow("a vLLM 0.33 prefill worker cannot push to such blocks");
    expect(pair([FULL], { ours: 32 }).judged().plan.blockSizeRatio).toBe(2);
  });

  it("field.md P2, H1: what a vLLM P refuses by its own table, for vLLM's reason and in the handshake", () => {
    const local = { tpSize: 2 };
    const judged = () => pair([FULL], { isPlain: true, local }).judged();
    expect(judged).toThrow(
      "engine p: a vLLM refuses a peer of TP 2, more than its own and than the 1 KV heads",
    );
    const { blocks, plan } = pair([FULL], { local });
    expect(plan(blocks(64)).lengthBytes).toBe(64 * CELL_BYTES);
  });

  it.each([
    ["local", { localBlockIds: [[1, 2, 3, 4]] }, 1],
    ["local", { localBlockIds: [[1, 2, 3, 4], [1], [1]], remoteBlockIds: undefined }, 3],
    ["remote", { remoteBlockIds: [[1, 2, 3, 4]] }, 1],
  ])("%s blocks of another number of groups: %j", (side, change, given) => {
    const { blocks, plan } = pair([FULL, WINDOW]);
    const refused = () => plan({ ...blocks(64), ...change });
    expect(refused).toThrow(code("KV_BLOCKS_MISMATCH"));
    expect(refused).toThrow(
      `${side} block ids of ${given} KV cache groups are given, the engine has 2`,
    );
  });
});
