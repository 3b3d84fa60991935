import type { BlockIds, KvCacheConfig, KvCacheKind } from "@kv/interface";
import { exchangedBlocks, type RankGeometry } from "@kv/plan";
import { PUSH_CONTROL, type Registration } from "@kv/protocol";
import { testContext } from "@kv/testing/worker-context";
import { memoryNetwork, memoryTransport } from "@kv/transport-memory";
import { describe, expect, it } from "vitest";
import { blocksToFetch } from "../../connector/src/scheduler/decode-requests.js";
import { consumerEngines } from "../src/prefill/consumer-engine.js";
import { writeBlocks } from "../src/prefill/write-blocks.js";
import { planReceive } from "../src/receive.js";
import type { RegistrationOrder } from "../src/step-metadata.js";

const BLOCK_TOKENS = 16;
const NUM_BLOCKS = 32;
const NUM_TOKENS = 150;
/** The K and V of one token and head. */
const CELL_BYTES = 16;
const STATE = { convProjectionBytes: [64, 32, 32], convBytes: 128, recurrentBytes: 256 };

interface Group {
  readonly kind: KvCacheKind;
  readonly slidingWindowTokens?: number;
  readonly heads: number;
}

const MODELS: Readonly<Record<string, readonly Group[]>> = {
  "sliding windows beside full attention": [
    { kind: "full", heads: 2 },
    { kind: "swa", slidingWindowTokens: 40, heads: 2 },
  ],
  "state-space layers beside full attention": [
    { kind: "full", heads: 2 },
    { kind: "mamba", heads: 0 },
  ],
  MLA: [{ kind: "mla", heads: 1 }],
};

function blockBytes({ kind, heads }: Group): number {
  const attention = Math.max(1, heads) * BLOCK_TOKENS * CELL_BYTES;
  return kind === "mamba" ? STATE.convBytes + STATE.recurrentBytes : attention;
}

async function side(
  groups: readonly Group[],
  host: string,
  network: ReturnType<typeof memoryNetwork>,
) {
  const transport = memoryTransport({ network, host });
  const agent = await transport.createAgent();
  const memories = groups.map((group) => transport.allocate(blockBytes(group) * NUM_BLOCKS));
  for (const memory of memories) await agent.register(memory);
  const geometry: RankGeometry = {
    tpRank: 0,
    tpSize: 1,
    kernelBlockSize: BLOCK_TOKENS,
    physicalBlocksPerLogical: 1,
    layout: "LBHNC",
    attentionBackend: "SIM",
    deviceId: 0,
    ...(groups.some(({ kind }) => kind === "mamba") ? { stateSpace: STATE } : {}),
    regions: groups.map((group, index) => ({
      name: `layers.${index}`,
      baseAddress: memories[index]?.address ?? 0,
      numBlocks: NUM_BLOCKS,
      blockLengthBytes: blockBytes(group),
      blockStrideBytes: blockBytes(group),
      groupId: index,
      memoryType: "DRAM" as const,
    })),
  };
  const block = (group: number, id: number) => {
    const length = blockBytes(groups[group] as Group);
    return memories[group]?.bytes.subarray(id * length, (id + 1) * length) ?? new Uint8Array();
  };
  return { transport, agent, geometry, memories, block };
}

describe.each(Object.entries(MODELS))("%s", (_, groups) => {
  it("each group's blocks land in D's blocks, only the tail of a window and the last state are moved, and D plans the same bytes", async () => {
    const network = memoryNetwork();
    const p = await side(groups, "p", network);
    const d = await side(groups, "d", network);
    for (const memory of p.memories)
      for (let i = 0; i < memory.bytes.length; i++) memory.bytes[i] = (i * 7 + 1) % 251;
    for (const memory of d.memories) memory.bytes.fill(0xdb);
    const config = {
      groups: groups.map(({ kind, slidingWindowTokens }, index) => ({
        kind,
        layerNames: [`layers.${index}`],
        ...(slidingWindowTokens === undefined ? {} : { slidingWindowTokens }),
      })),
      blockSize: BLOCK_TOKENS,
      physicalBlocksPerLogical: 1,
    } as unknown as KvCacheConfig;
    // Block tables by position in the sequence. A state has one block.
    const table = (from: number, step: number): BlockIds =>
      groups.map(({ kind }, group) =>
        Array.from(
          { length: kind === "mamba" ? 1 : Math.ceil(NUM_TOKENS / BLOCK_TOKENS) },
          (_, i) => from + group + i * step,
        ),
      );
    const promptBlockIds = exchangedBlocks(table(2, 1), config, { numTokens: NUM_TOKENS });
    const { localBlockIds, localComputedBlocks } = blocksToFetch(
      table(3, 2),
      0,
      NUM_TOKENS,
      config,
    );

    const context = testContext({
      agent: p.agent,
      local: p.geometry,
      incarnation: "d",
      features: [PUSH_CONTROL],
      model: { numKvHeads: 2, groups: groups.map(({ kind }) => kind) },
      remote: async () => [
        { tpRank: 0, geometry: d.geometry, agentMetadata: await d.agent.localMetadata() },
      ],
    });
    const consumers = consumerEngines(context);
    const address = { engineId: "d", host: "d", port: 1, tpSize: 1, dcpSize: 1, ppSize: 1 };
    const { engine: consumer } = await consumers.open(address);
    const registration = {
      wireId: "d1",
      engineId: "d",
      blockIds: localBlockIds,
      own: { rank: 0, numTokens: NUM_TOKENS, computedBlocks: localComputedBlocks },
    } as unknown as Registration;
    const order = {
      requestId: "p1",
      wireId: "p1",
      generation: 1,
      blockIds: [],
      promptBlockIds,
      numTokens: NUM_TOKENS,
    };
    const write = { registration, ranks: [0], order };
    await writeBlocks(consumer, write, new AbortController().signal, context);

    for (const [group, ids] of localBlockIds.entries()) {
      for (const [i, id] of ids.entries()) {
        expect(d.block(group, id)).toEqual(p.block(group, promptBlockIds[group]?.[i] ?? -1));
      }
      // No other block of D has changed.
      for (let id = 0; id < NUM_BLOCKS; id++) {
        if (!ids.includes(id)) expect(d.block(group, id).every((byte) => byte === 0xdb)).toBe(true);
      }
    }
    // Before P has answered, D plans with placeholders for P's blocks: as many as P transfers.
    const plan = consumer.targets.get(0)?.plan;
    const pending = { requestId: "d1", localBlockIds, localComputedBlocks, numTokens: NUM_TOKENS };
    const received = planReceive(
      { plan, features: new Set([PUSH_CONTROL]), address: address } as never,
      pending as unknown as RegistrationOrder,
      { ...context, caches: { config } as never },
    );
    const moved = localBlockIds.reduce(
      (sum, ids, group) => sum + ids.length * blockBytes(groups[group] as Group),
      0,
    );
    expect(received.lengthBytes).toBe(moved);
    await p.transport.close();
    await d.transport.close();
  });
});
