import type { RankGeometry } from "@kv/plan";
import { PUSH_CONTROL, type Registration } from "@kv/protocol";
import { testContext } from "@kv/testing/worker-context";
import { handshakeTargetRanks } from "@kv/topology";
import { memoryNetwork, memoryTransport } from "@kv/transport-memory";
import { describe, expect, it } from "vitest";
import { consumerEngines } from "../src/prefill/consumer-engine.js";
import { writeBlocks } from "../src/prefill/write-blocks.js";

/**
 * The whole model: the number of heads, the bytes of K and V of one token and head, and the parts
 * of the state.
 */
const HEADS = 4;
const CELL_BYTES = 16;
const BLOCK_TOKENS = 16;
const CONV = [64, 32, 32];
const RECURRENT_BYTES = 256;
const NUM_BLOCKS = 8;
/** Blocks of the prompt, by group: attention, then the state. */
const PROMPT = [[2, 3, 4], [5]];
const REGISTERED = [[6, 1, 3], [2]];

const UNTOUCHED = 0xdb;
const sum = (numbers: readonly number[]) => numbers.reduce((total, each) => total + each, 0);

/**
 * The byte of the whole model at an offset in a part of a block. Parts of an attention block are
 * heads; parts of a state are projections and the recurrent state.
 */
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
  return Array.from(
    { length: HEADS / tpSize },
    (_, head) => (tpRank * HEADS) / tpSize + head,
  ).flatMap((head) => Array.from({ length: perHead }, (_, i) => [head, i] as const));
}

async function rank(
  name: string,
  tpRank: number,
  tpSize: number,
  network: ReturnType<typeof memoryNetwork>,
) {
  const transport = memoryTransport({ network, host: `${name}${tpRank}` });
  const agent = await transport.createAgent();
  const lengths = [0, 1].map((group) => rankBlock(group, tpRank, tpSize).length);
  const memories = lengths.map((length) => transport.allocate(length * NUM_BLOCKS));
  for (const memory of memories) {
    memory.bytes.fill(UNTOUCHED);
    await agent.register(memory);
  }
  const convProjectionBytes = CONV.map((bytes) => bytes / tpSize);
  const stateSpace = {
    convProjectionBytes,
    convBytes: sum(convProjectionBytes),
    recurrentBytes: RECURRENT_BYTES / tpSize,
  };
  const geometry: RankGeometry = {
    tpRank,
    tpSize,
    kernelBlockSize: BLOCK_TOKENS,
    physicalBlocksPerLogical: 1,
    layout: "LBHNC",
    attentionBackend: "SIM",
    deviceId: 0,
    stateSpace,
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
  const block = (group: number, id: number) =>
    memories[group]?.bytes.subarray(id * (lengths[group] ?? 0), (id + 1) * (lengths[group] ?? 0)) ??
    new Uint8Array();
  return { transport, agent, geometry, tpRank, block };
}

/** The geometry that a handshake carries: the sum of a convolution state, without its division. */
function overHandshake({ stateSpace, ...geometry }: RankGeometry): RankGeometry {
  const { convBytes = 0, recurrentBytes = 0 } = stateSpace ?? {};
  return { ...geometry, stateSpace: { convBytes, recurrentBytes } };
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
      const engine = (name: string, size: number) =>
        Promise.all(Array.from({ length: size }, (_, tpRank) => rank(name, tpRank, size, network)));
      const producers = await engine("p", pSize);
      const consumers = await engine("d", dSize);
      for (const { block, tpRank } of producers) {
        for (const [group, ids] of PROMPT.entries()) {
          for (const [place, id] of ids.entries()) {
            const cells = rankBlock(group, tpRank, pSize);
            block(group, id).set(cells.map(([part, offset]) => byteOf(group, place, part, offset)));
          }
        }
      }
      const order = {
        requestId: "p1",
        promptBlockIds: PROMPT,
        numTokens: 3 * BLOCK_TOKENS,
      };
      for (const { agent, geometry, tpRank } of producers) {
        const context = testContext({
          agent,
          local: geometry,
          incarnation: "d",
          features: [PUSH_CONTROL],
          model: { numKvHeads: HEADS, groups: ["full", "mamba"] },
          remote: (ranks) =>
            Promise.all(
              consumers
                .filter((consumer) => ranks.includes(consumer.tpRank))
                .map(async (consumer) => ({
                  tpRank: consumer.tpRank,
                  geometry: overHandshake(consumer.geometry),
                  agentMetadata: await consumer.agent.localMetadata(),
                })),
            ),
        });
        const address = { engineId: "d", host: "d", port: 1, tpSize: dSize, dcpSize: 1, ppSize: 1 };
        const { engine: consumer } = await consumerEngines(context).open(address);
        expect([...consumer.targets.keys()]).toEqual(
          handshakeTargetRanks({ tpRank, tpSize: pSize, remoteTpSize: dSize }),
        );
        for (const target of consumer.targets.keys()) {
          const own = { rank: target, numTokens: order.numTokens, computedBlocks: [0, 0] };
          const registration = {
            wireId: "d1",
            engineId: "d",
            blockIds: REGISTERED,
            own,
          } as unknown as Registration;
          const write = { registration, ranks: [target], order };
          await writeBlocks(consumer, write, new AbortController().signal, context);
        }
      }
      for (const { block, tpRank } of consumers) {
        for (const [group, registered] of REGISTERED.entries()) {
          const cells = rankBlock(group, tpRank, dSize);
          for (let id = 0; id < NUM_BLOCKS; id++) {
            const place = registered.indexOf(id);
            const expected = cells.map(([part, offset]) =>
              place < 0 ? UNTOUCHED : byteOf(group, place, part, offset),
            );
            expect([...block(group, id)], `rank ${tpRank}, group ${group}, block ${id}`).toEqual(
              expected,
            );
          }
        }
      }
      for (const { transport } of [...producers, ...consumers]) await transport.close();
    },
  );
});
