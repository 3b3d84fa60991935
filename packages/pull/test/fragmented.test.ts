import type { TransferRequest, Transport } from "@kv/interface";
import { createScenario, prompt } from "@kv/testing/scenarios/scenario";
import { seededRandom } from "@kv/transport-memory";
import { describe, expect, it } from "vitest";

const BLOCKS = 256;
const BLOCK_TOKENS = 16;
const LAYERS = 2;

/** The block ids of a pool: runs of `length` consecutive ids, in shuffled order. */
function stretches(length: number, seed: string): number[] {
  const random = seededRandom(seed);
  const begins = Array.from({ length: BLOCKS / length }, (_, index) => index * length);
  for (let at = begins.length - 1; at > 0; at--) {
    const other = random.integer(at + 1);
    [begins[at], begins[other]] = [begins[other] as number, begins[at] as number];
  }
  return begins.flatMap((begin) => Array.from({ length }, (_, index) => begin + index));
}

interface HandedOver {
  /**
   * Number of entries that the connector passes to the transport: runs times offsets, or id pairs.
   */
  readonly descriptors: number;
  readonly pairs: readonly (readonly [local: number, remote: number])[];
}

/** A transport that records the descriptors of each READ. */
function counting(seen: HandedOver[]): (transport: Transport) => Transport {
  return (transport) => ({
    ...transport,
    async createAgent(options) {
      const agent = await transport.createAgent(options);
      return {
        ...agent,
        transfer(request) {
          seen.push(handedOver(request));
          return agent.transfer(request);
        },
      };
    },
  });
}

function handedOver(request: TransferRequest): HandedOver {
  const pairs: [number, number][] = [];
  if (request.runs === undefined) {
    for (const [at, local] of request.localIds.entries())
      pairs.push([local, request.remoteIds[at] ?? -1]);
    return { descriptors: pairs.length, pairs };
  }
  const { runs, offsets = Int32Array.of(0, 0) } = request;
  for (let from = 0; from < offsets.length; from += 2) {
    const [localOffset = 0, remoteOffset = 0] = offsets.subarray(from, from + 2);
    for (let at = 0; at < runs.length; at += 3) {
      const [local = 0, remote = 0, count = 0] = runs.subarray(at, at + 3);
      for (let index = 0; index < count; index++)
        pairs.push([localOffset + local + index, remoteOffset + remote + index]);
    }
  }
  return { descriptors: (runs.length / 3) * (offsets.length / 2), pairs };
}

/**
 * Number of descriptors after merging list neighbours that are consecutive on both sides, as NIXL
 * does.
 */
function merged(pairs: HandedOver["pairs"]): number {
  return pairs.filter(([local, remote], at) => {
    const [before, from] = pairs[at - 1] ?? [Number.NaN, Number.NaN];
    return !(before + 1 === local && from + 1 === remote);
  }).length;
}

/** vLLM's descriptors for the same blocks: one for each block of each region, in sequence order. */
function asVllm({ pairs }: HandedOver, remoteBlockIds: readonly number[]): HandedOver["pairs"] {
  const byRemote = new Map(pairs.map((pair) => [pair[1], pair]));
  return Array.from({ length: LAYERS }, (_, region) => region * BLOCKS).flatMap((offset) =>
    remoteBlockIds.map((id) => byRemote.get(offset + id) ?? expect.fail(`block ${id} is not read`)),
  );
}

/**
 * The smallest possible number of descriptors: one for each run that is consecutive on both sides.
 */
const best = ({ pairs }: HandedOver) => merged([...pairs].sort(([one], [other]) => one - other));

/**
 * Sends requests with the given numbers of blocks, one after another, between two engines with
 * these pools. Returns the descriptors of each READ, and vLLM's descriptors for the same blocks.
 */
async function requests(
  pools: { p: number[]; d: number[]; tpSize: number },
  sizes: readonly number[],
) {
  const play = createScenario();
  const seen: HandedOver[] = [];
  const common = { numBlocks: BLOCKS };
  const p = await play.engine("p", { ...common, blockOrder: pools.p });
  const { tpSize, d: blockOrder } = pools;
  const d = await play.engine("d", {
    ...common,
    blockOrder,
    tpSize,
    wrapTransport: counting(seen),
  });
  const found: { ours: HandedOver; theirs: HandedOver["pairs"] }[] = [];
  for (const [n, blocks] of sizes.entries()) {
    const asked = prompt(n, blocks * BLOCK_TOKENS - (n % 3));
    const params = await play.prefilled(p, 1, asked);
    expect(await play.decoded(d, params, 1, asked)).toBe("ok");
    // D notifies P with its next step, and P frees the blocks.
    await play.clock.advance(100);
    const ids = (params.remote_block_ids as number[][])[0] ?? [];
    const reads = seen.splice(0);
    expect(reads).toHaveLength(tpSize);
    for (const ours of reads) {
      expect(ours.pairs).toHaveLength(blocks * LAYERS);
      found.push({ ours, theirs: asVllm(ours, ids) });
    }
  }
  return found;
}

/** Even numbers of blocks use whole runs of the pools; odd numbers split runs. */
const EVEN = [2, 4, 8, 16, 32, 64, 128];
const ODD = [1, 3, 7, 33, 65, 101];

describe.each([1, 2])(
  "descriptors that a decode engine with TP %i passes to its transport",
  (tpSize) => {
    it.each([
      { p: 1, d: 1, sizes: EVEN },
      { p: 2, d: 2, sizes: EVEN },
      { p: 4, d: 4, sizes: EVEN },
      { p: 4, d: 8, sizes: EVEN },
      { p: 16, d: 2, sizes: EVEN },
      { p: 2, d: 2, sizes: ODD },
      { p: 16, d: 4, sizes: ODD },
    ])(
      "pools with runs of $p and $d blocks, requests of $sizes blocks: never more than vLLM's, and at most half for consecutive blocks",
      async ({ p, d, sizes }) => {
        const found = await requests({ p: stretches(p, "p"), d: stretches(d, "d"), tpSize }, sizes);
        let halved = 0;
        for (const { ours, theirs } of found) {
          expect(ours.descriptors).toBeLessThanOrEqual(theirs.length);
          // NIXL's merging of list neighbours gives the smallest possible number of descriptors.
          expect(merged(ours.pairs)).toBe(best(ours));
          expect(merged(ours.pairs)).toBeLessThanOrEqual(merged(theirs));
          if (best(ours) * 2 > theirs.length) continue;
          halved += 1;
          expect(ours.descriptors * 2).toBeLessThanOrEqual(theirs.length);
        }
        if (sizes === EVEN) expect(halved).toBe(p === 1 ? 0 : found.length);
      },
    );

    it.each([2, 150])(
      "block tables in descending order with %i blocks: one descriptor for each layer",
      async (blocks) => {
        const down = Array.from({ length: BLOCKS }, (_, index) => BLOCKS - 1 - index);
        for (const { ours, theirs } of await requests({ p: down, d: down, tpSize }, [blocks])) {
          // In sequence order, no block is followed by the next higher one, so nothing merges.
          expect(merged(theirs)).toBe(blocks * LAYERS);
          expect(ours.descriptors).toBe(LAYERS);
        }
      },
    );
  },
);
