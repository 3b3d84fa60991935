import type { BlockIds, KvCacheConfig, KvCacheKind } from "@kv/interface";
import { exchangedBlocks, type ModelGeometry, type RankGeometry } from "@kv/plan";
import { PUSH_CONTROL, type Registration } from "@kv/protocol";
import { testContext } from "@kv/testing/worker-context";
import { handshakeTargetRanks } from "@kv/topology";
import { memoryNetwork, memoryTransport } from "@kv/transport-memory";
import { describe, expect, it } from "vitest";
import { blocksToFetch } from "../../connector/src/scheduler/decode-requests.js";
import { consumerEngines } from "../src/prefill/consumer-engine.js";
import { writeBlocks } from "../src/prefill/write-blocks.js";
import { planReceive } from "../src/receive.js";
import type { RegistrationOrder } from "../src/step-metadata.js";

const BLOCK_TOKENS = 16;
const NUM_BLOCKS = 32;
/** The K and V of one token and head. */
const CELL_BYTES = 16;
const UNTOUCHED = 0xdb;
/** The parts of the whole model's state. */
const CONV = [64, 32, 32];
const RECURRENT_BYTES = 256;

/** A rank with memory of its own. `lengths`: the bytes of a block, by group. */
async function rankOf(
  network: ReturnType<typeof memoryNetwork>,
  name: string,
  [tpRank, tpSize]: readonly [number, number],
  lengths: readonly number[],
  hasState: boolean,
) {
  const transport = memoryTransport({ network, host: `${name}${tpRank}` });
  const agent = await transport.createAgent();
  const memories = lengths.map((length) => transport.allocate(length * NUM_BLOCKS));
  for (const memory of memories) {
    memory.bytes.fill(UNTOUCHED);
    await agent.register(memory);
  }
  const convProjectionBytes = CONV.map((bytes) => bytes / tpSize);
  const convBytes = convProjectionBytes.reduce((sum, bytes) => sum + bytes, 0);
  const recurrentBytes = RECURRENT_BYTES / tpSize;
  const geometry: RankGeometry = {
    tpRank,
    tpSize,
    kernelBlockSize: BLOCK_TOKENS,
    physicalBlocksPerLogical: 1,
    layout: "LBHNC",
    attentionBackend: "SIM",
    deviceId: 0,
    ...(hasState ? { stateSpace: { convProjectionBytes, convBytes, recurrentBytes } } : {}),
    regions: memories.map((memory, groupId) => ({
      name: `layers.${groupId}`,
      baseAddress: memory.address,
      numBlocks: NUM_BLOCKS,
      blockLengthBytes: lengths[groupId] ?? 0,
      blockStrideBytes: lengths[groupId] ?? 0,
      groupId,
      memoryType: "DRAM" as const,
    })),
  };
  const block = (group: number, id: number) => {
    const length = lengths[group] ?? 0;
    return memories[group]?.bytes.subarray(id * length, (id + 1) * length) ?? new Uint8Array();
  };
  return { transport, agent, geometry, tpRank, block };
}
type Rank = Awaited<ReturnType<typeof rankOf>>;

/** The geometry that a handshake carries: the sum of a convolution state, without its division. */
function overHandshake({ stateSpace, ...geometry }: RankGeometry): RankGeometry {
  if (stateSpace === undefined) return geometry;
  const { convBytes, recurrentBytes } = stateSpace;
  return { ...geometry, stateSpace: { convBytes, recurrentBytes } };
}

interface Pushed {
  readonly model: ModelGeometry;
  readonly numTokens: number;
  readonly promptBlockIds: BlockIds;
  readonly registered: BlockIds;
  readonly computedBlocks: readonly number[];
}

/** A rank of P writes a request's blocks into those of all its ranks of D. */
async function push(
  { agent, geometry }: Rank,
  consumers: readonly Rank[],
  { model, numTokens, promptBlockIds, registered: blockIds, computedBlocks }: Pushed,
) {
  const context = testContext({
    agent,
    local: geometry,
    incarnation: "d",
    features: [PUSH_CONTROL],
    model,
    remote: (ranks) =>
      Promise.all(
        consumers
          .filter(({ tpRank }) => ranks.includes(tpRank))
          .map(async ({ tpRank, geometry, agent }) => ({
            tpRank,
            geometry: overHandshake(geometry),
            agentMetadata: await agent.localMetadata(),
          })),
      ),
  });
  const tpSize = consumers.length;
  const address = { engineId: "d", host: "d", port: 1, tpSize, dcpSize: 1, ppSize: 1 };
  const { engine: consumer } = await consumerEngines(context).open(address);
  for (const rank of consumer.targets.keys()) {
    const own = { rank, numTokens, computedBlocks };
    const registration = { wireId: "d1", engineId: "d", blockIds, own } as unknown as Registration;
    const order = { requestId: "p1", promptBlockIds, numTokens };
    const write = { registration, ranks: [rank], order };
    await writeBlocks(consumer, write, new AbortController().signal, context);
  }
  return { context, consumer, address };
}

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

describe.each(Object.entries(MODELS))("%s", (_, groups) => {
  it("each group's blocks land in D's blocks, only the tail of a window and the last state are moved, and D plans the same bytes", async () => {
    const numTokens = 150;
    const state = CONV.reduce((sum, bytes) => sum + bytes, RECURRENT_BYTES);
    const lengths = groups.map(({ kind, heads }) =>
      kind === "mamba" ? state : heads * BLOCK_TOKENS * CELL_BYTES,
    );
    const network = memoryNetwork();
    const hasState = groups.some(({ kind }) => kind === "mamba");
    const p = await rankOf(network, "p", [0, 1], lengths, hasState);
    const d = await rankOf(network, "d", [0, 1], lengths, hasState);
    for (const group of groups.keys())
      for (let id = 0; id < NUM_BLOCKS; id++)
        p.block(group, id).forEach((__, at, bytes) => {
          bytes[at] = (id * 31 + at * 7 + 1) % 219;
        });
    const config = {
      groups: groups.map(({ heads: __, ...group }, index) => ({
        ...group,
        layerNames: [`layers.${index}`],
      })),
      blockSize: BLOCK_TOKENS,
      physicalBlocksPerLogical: 1,
    } as unknown as KvCacheConfig;
    // Block tables by position in the sequence. A state has one block.
    const table = (from: number, step: number): BlockIds =>
      groups.map(({ kind }, group) =>
        Array.from(
          { length: kind === "mamba" ? 1 : Math.ceil(numTokens / BLOCK_TOKENS) },
          (__, i) => from + group + i * step,
        ),
      );
    const promptBlockIds = exchangedBlocks(table(2, 1), config, { numTokens });
    const fetched = blocksToFetch(table(3, 2), 0, numTokens, config);
    const { localBlockIds: registered, localComputedBlocks: computedBlocks } = fetched;
    const model = { numKvHeads: 2, groups: groups.map(({ kind }) => kind) };
    const { context, consumer, address } = await push(p, [d], {
      model,
      numTokens,
      promptBlockIds,
      registered,
      computedBlocks,
    });

    for (const [group, ids] of registered.entries()) {
      for (const [i, id] of ids.entries()) {
        expect(d.block(group, id)).toEqual(p.block(group, promptBlockIds[group]?.[i] ?? -1));
      }
      // No other block of D has changed.
      for (let id = 0; id < NUM_BLOCKS; id++) {
        if (ids.includes(id)) continue;
        expect(d.block(group, id).every((byte) => byte === UNTOUCHED)).toBe(true);
      }
    }
    // Before P has answered, D plans with placeholders for P's blocks: as many as P transfers.
    const plan = consumer.targets.get(0)?.plan;
    const received = planReceive(
      { plan, features: new Set([PUSH_CONTROL]), address } as never,
      { requestId: "d1", ...fetched, numTokens } as unknown as RegistrationOrder,
      { ...context, caches: { config } as never },
    );
    const moved = registered.map((ids, group) => ids.length * (lengths[group] ?? 0));
    expect(received.lengthBytes).toBe(moved.reduce((sum, bytes) => sum + bytes, 0));
    for (const { transport } of [p, d]) await transport.close();
  });
});

const HEADS = 4;
/** Blocks of the prompt, by group: attention, then the state. */
const PROMPT = [[2, 3, 4], [5]];
const REGISTERED = [[6, 1, 3], [2]];

const byteOf = (group: number, block: number, part: number, offset: number) =>
  (group * 89 + block * 53 + part * 29 + offset * 7 + 1) % 251;

/**
 * A rank's block, byte by byte: for each byte, the part of the whole model's block and the offset
 * in that part.
 */
function rankBlock(
  group: number,
  tpRank: number,
  tpSize: number,
): readonly (readonly [number, number])[] {
  const share = (part: number, bytes: number) =>
    Array.from(
      { length: bytes / tpSize },
      (_, i) => [part, (tpRank * bytes) / tpSize + i] as const,
    );
  if (group === 1) return [...CONV, RECURRENT_BYTES].flatMap((bytes, part) => share(part, bytes));
  const perHead = BLOCK_TOKENS * CELL_BYTES;
  return share(0, HEADS).flatMap(([, head]) =>
    Array.from({ length: perHead }, (_, i) => [head, i] as const),
  );
}

describe("a state-space group beside full attention, pushed between unequal TP sizes", () => {
  it.each([
    [2, 1],
    [4, 1],
    [1, 2],
    [2, 4],
  ])(
    "TP %i → %i: every rank gets its share of each projection and of the state",
    async (pSize, dSize) => {
      const network = memoryNetwork();
      const engine = (name: string, tpSize: number) =>
        Promise.all(
          Array.from({ length: tpSize }, (_, tpRank) => {
            const lengths = [0, 1].map((group) => rankBlock(group, tpRank, tpSize).length);
            return rankOf(network, name, [tpRank, tpSize], lengths, true);
          }),
        );
      const producers = await engine("p", pSize);
      const consumers = await engine("d", dSize);
      const bytesOf = (group: number, tpRank: number, tpSize: number, place: number) =>
        rankBlock(group, tpRank, tpSize).map(([part, offset]) =>
          place < 0 ? UNTOUCHED : byteOf(group, place, part, offset),
        );
      for (const { block, tpRank } of producers)
        for (const [group, ids] of PROMPT.entries())
          for (const [place, id] of ids.entries())
            block(group, id).set(bytesOf(group, tpRank, pSize, place));
      for (const producer of producers) {
        const { consumer } = await push(producer, consumers, {
          model: { numKvHeads: HEADS, groups: ["full", "mamba"] },
          numTokens: 3 * BLOCK_TOKENS,
          promptBlockIds: PROMPT,
          registered: REGISTERED,
          computedBlocks: [0, 0],
        });
        const { tpRank } = producer;
        expect([...consumer.targets.keys()]).toEqual(
          handshakeTargetRanks({ tpRank, tpSize: pSize, remoteTpSize: dSize }),
        );
      }
      for (const { block, tpRank } of consumers)
        for (const [group, registered] of REGISTERED.entries())
          for (let id = 0; id < NUM_BLOCKS; id++)
            expect([...block(group, id)], `rank ${tpRank}, group ${group}, block ${id}`).toEqual(
              bytesOf(group, tpRank, dSize, registered.indexOf(id)),
            );
      for (const { transport } of [...producers, ...consumers]) await transport.close();
    },
  );
});
