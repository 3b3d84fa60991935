import { cpuPlatform, readTransferConfig } from "@kv/connector";
import type {
  BlockIds,
  ConnectorRequest,
  KvCacheConfig,
  KvTransferParams,
  WorkerOutput,
} from "@kv/interface";
import { engineIdentity } from "@kv/testing/engine-identity";
import { held } from "@kv/testing/nothing-left";
import {
  memoryNetwork,
  memorySideChannel,
  memoryTransport,
  seededRandom,
  type VirtualClock,
  virtualClock,
} from "@kv/transport-memory";
import { afterEach, beforeEach, describe, expect, test } from "vitest";
import { pullConnector } from "../src/index.js";

const BLOCK_TOKENS = 4;
const TOKEN_BYTES = 16;
const BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES;
const LAYERS = ["layers.0", "layers.1", "layers.2"];

/** A byte of a token's latent. No two layers or tokens have the same latent. */
const latent = (layer: number, token: number, at: number) =>
  (1 + layer * 83 + token * 17 + at * 5) & 0xff || 1;

let clock: VirtualClock;
let network: ReturnType<typeof memoryNetwork>;
const closers: (() => Promise<void>)[] = [];
beforeEach(() => {
  clock = virtualClock();
  network = memoryNetwork({
    clock,
    random: seededRandom(3),
    latency: { latencyMs: 1, minPieces: 2 },
  });
});
afterEach(async () => {
  for (const close of closers.splice(0)) await clock.settle(close());
  expect(held({ ...network.outstanding(), timers: clock.pendingTimers })).toEqual({});
});

/**
 * An engine with one rank of an MLA model. Each of the given groups of layers has its own regions
 * and block table.
 */
async function engine(name: string, grouped: readonly (readonly number[])[], kind = "mla") {
  const host = network.host(name);
  const transport = memoryTransport({ network, host });
  const sideChannel = memorySideChannel({ network, host });
  const cache: KvCacheConfig = {
    groups: grouped.map((layers) => ({
      kind,
      layerNames: layers.map((layer) => LAYERS[layer] ?? ""),
    })),
    blockSize: BLOCK_TOKENS,
    physicalBlocksPerLogical: 1,
    numKvHeads: 1,
    headSize: 4,
    numHiddenLayers: 3,
    dtype: "torch.float32",
    cacheDtype: "auto",
    layout: "LBNHC",
    attentionBackend: "SIM",
  };
  const options = {
    clock: host.clock,
    random: host.random,
    cache,
    transport,
    sideChannel,
    platform: cpuPlatform(),
    config: {
      ...readTransferConfig({ kv_connector: "NixlConnector", kv_role: "kv_both" }),
      sideChannelHost: name,
    },
    engine: engineIdentity(name, { isHmaEnabled: true }),
  };
  const memories = LAYERS.map(() => transport.allocate(16 * BLOCK_BYTES));
  for (const memory of memories) memory.bytes.fill(0xdb);
  const scheduler = await pullConnector.createScheduler(options);
  const worker = await pullConnector.createWorker({ ...options, tpRank: 0, ppRank: 0 });
  await worker.registerKvCaches({
    config: cache,
    regions: memories.map((memory, layer) => ({
      name: LAYERS[layer] ?? "",
      memory,
      offsetBytes: 0,
      numBlocks: 16,
      memoryType: "DRAM" as const,
      blockLengthBytes: BLOCK_BYTES,
      blockStrideBytes: BLOCK_BYTES,
      groupId: grouped.findIndex((layers) => layers.includes(layer)),
    })),
  });
  await scheduler.setHandshakeMetadata([await worker.handshakeMetadata()]);
  closers.push(async () => {
    await worker.close();
    await scheduler.close();
    await transport.close();
    for (const memory of memories) memory.close();
    await sideChannel.close();
  });
  const groupOf = (layer: number) => grouped.findIndex((layers) => layers.includes(layer));
  return {
    scheduler,
    /** The bytes of a token, located with the block table of the layer's group. */
    token(tables: BlockIds, layer: number, token: number): Uint8Array {
      const block = tables[groupOf(layer)]?.[Math.floor(token / BLOCK_TOKENS)] ?? -1;
      const at = block * BLOCK_BYTES + (token % BLOCK_TOKENS) * TOKEN_BYTES;
      return memories[layer]?.bytes.subarray(at, at + TOKEN_BYTES) ?? new Uint8Array();
    },
    step(): WorkerOutput {
      worker.startLoad(JSON.parse(JSON.stringify(scheduler.buildStepMetadata())));
      const output = worker.collectFinished();
      scheduler.applyWorkerOutput(output);
      return output;
    },
  };
}
type Engine = Awaited<ReturnType<typeof engine>>;

const request = (kvTransferParams: KvTransferParams): ConnectorRequest => ({
  requestId: "r",
  numPromptTokens: 10,
  kvTransferParams,
  promptTokenIds: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9],
});

function prefill(p: Engine, tables: BlockIds): KvTransferParams {
  const asked = request({ do_remote_decode: true, do_remote_prefill: false });
  p.scheduler.afterAllocation(asked, tables, 0);
  p.step();
  for (const layer of LAYERS.keys())
    for (let token = 0; token < 10; token++)
      p.token(tables, layer, token).forEach((_, at, bytes) => {
        bytes[at] = latent(layer, token, at);
      });
  const { kvTransferParams } = p.scheduler.requestFinished(asked, tables, "length");
  return JSON.parse(JSON.stringify(kvTransferParams));
}

async function decode(
  p: Engine,
  d: Engine,
  params: KvTransferParams,
  tables: BlockIds,
  computed: number,
) {
  const asked = request(params);
  const { tokens } = d.scheduler.matchedTokens(asked, computed);
  expect(tokens).toBe(10 - computed);
  d.scheduler.afterAllocation(asked, tables, tokens);
  let sent = false;
  for (let round = 0; round < 1000; round++) {
    sent = p.step().finishedSending.includes("r") || sent;
    const { finishedReceiving, failedReceiving } = d.step();
    if (finishedReceiving.includes("r")) {
      d.scheduler.requestFinished(asked, tables, "stopped");
      d.step();
      for (let again = 0; again < 100 && !sent; again++) {
        await clock.advance(1);
        sent = p.step().finishedSending.includes("r");
      }
      return { failed: failedReceiving, sent };
    }
    await clock.advance(1);
  }
  return expect.fail("the request did not finish");
}

/** Groupings of the layers, and block tables for one group and for two. */
const ONE = [[0, 1, 2]];
const TWO = [[0, 1], [2]];
const OTHER_TWO = [[0], [1, 2]];
const P_BLOCKS = {
  one: [[5, 2, 9]],
  two: [
    [5, 2, 9],
    [11, 4, 6],
  ],
};
const D_BLOCKS = {
  one: [[1, 7, 3]],
  two: [
    [1, 7, 3],
    [4, 0, 8],
  ],
};

describe("engines that group a model's layers differently", () => {
  test.each([
    ["one group on P and two on D", ONE, P_BLOCKS.one, TWO, D_BLOCKS.two],
    ["two groups on P and one on D", TWO, P_BLOCKS.two, ONE, D_BLOCKS.one],
    ["two groups that split elsewhere", OTHER_TWO, P_BLOCKS.two, TWO, D_BLOCKS.two],
    ["equal groups in another order", [[2], [0, 1]], P_BLOCKS.two, TWO, D_BLOCKS.two],
  ])(
    "%s: D reads each layer's MLA latents with its own block table",
    async (_, pGroups, pTables, dGroups, dTables) => {
      for (const computed of [0, 4]) {
        const p = await clock.settle(engine(`p${computed}`, pGroups));
        const d = await clock.settle(engine(`d${computed}`, dGroups));
        const params = prefill(p, pTables);
        const { failed, sent } = await decode(p, d, params, dTables, computed);
        expect(failed).toEqual([]);
        expect(sent).toBe(true);
        for (const layer of LAYERS.keys()) {
          for (let token = 0; token < 12; token++) {
            // Blocks of the prefix hit are unchanged, and the last block is zero after the prompt's
            // end.
            const wanted = (at: number) =>
              token < computed ? 0xdb : token < 10 ? latent(layer, token, at) : 0;
            const found = [...d.token(dTables, layer, token)];
            expect([layer, token, found]).toEqual([
              layer,
              token,
              found.map((__, at) => wanted(at)),
            ]);
          }
        }
      }
    },
  );

  test("block ids for another number of groups than the regions have are refused, with both numbers", async () => {
    const p = await clock.settle(engine("p", OTHER_TWO));
    const d = await clock.settle(engine("d", ONE));
    const params = { ...prefill(p, P_BLOCKS.two), remote_block_ids: P_BLOCKS.one };
    const { failed } = await decode(p, d, params, D_BLOCKS.one, 0);
    expect(failed).toMatchObject([
      {
        code: "KV_BLOCKS_MISMATCH",
        message: expect.stringMatching(/remote block ids of 1 .* have 2 groups/),
      },
    ]);
  });

  test("are refused for a model with KV heads", async () => {
    const p = await clock.settle(engine("p", OTHER_TWO, "full"));
    const d = await clock.settle(engine("d", TWO, "full"));
    const { failed } = await decode(p, d, prefill(p, P_BLOCKS.two), D_BLOCKS.two, 0);
    expect(failed).toMatchObject([{ code: "KV_PLAN_UNSUPPORTED" }]);
    await clock.advance(60_000);
  });
});
