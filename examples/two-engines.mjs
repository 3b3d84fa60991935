// Two engines without a model, in one process: P has the KV of a prompt, D reads it.
import { setTimeout as sleep } from "node:timers/promises";
import { cpuPlatform, readTransferConfig } from "@kv/connector";
import { createPullScheduler, createPullWorker } from "@kv/pull";
import { memoryNetwork, memorySideChannel, memoryTransport } from "@kv/transport-memory";

const layerNames = ["layers.0", "layers.1"];
/** @type {import("@kv/interface").KvCacheConfig} */
const cache = {
  groups: [{ kind: "full", layerNames }],
  blockSize: 16,
  physicalBlocksPerLogical: 1,
  numKvHeads: 4,
  headSize: 8,
  numHiddenLayers: 2,
  dtype: "torch.float32",
  cacheDtype: "auto",
  layout: "LBHNC",
  attentionBackend: "MINE",
};
const BLOCK_BYTES = 2 * 16 * 4 * 8 * 4; // K and V of 16 tokens; a token has 4 heads of 8 float32
const vllm = {
  vllmVersion: "0.33.0",
  connectorVersion: 15,
  isHmaEnabled: false,
  speculativeConfig: null,
};
const network = memoryNetwork();

/**
 * An engine with one rank and 32 blocks. Its scheduler side decides, its worker side moves bytes.
 */
async function startEngine(host, kv_role) {
  const transport = memoryTransport({ network, host });
  const sideChannel = memorySideChannel({ network, host });
  const config = {
    ...readTransferConfig({ kv_connector: "pull", kv_role }),
    sideChannelHost: host,
  };
  const engine = {
    engineId: host,
    tpSize: 1,
    ppSize: 1,
    dpRank: 0,
    model: { model: "m", ...vllm },
  };
  const both = { config, engine, sideChannel };
  const scheduler = createPullScheduler({ ...both, cache });
  const worker = createPullWorker({
    ...both,
    tpRank: 0,
    ppRank: 0,
    transport,
    platform: cpuPlatform(),
  });
  const regions = layerNames.map((name) => {
    const memory = transport.allocate(32 * BLOCK_BYTES);
    const sizes = { blockLengthBytes: BLOCK_BYTES, blockStrideBytes: BLOCK_BYTES, numBlocks: 32 };
    return { name, memory, memoryType: memory.memoryType, offsetBytes: 0, groupId: 0, ...sizes };
  });
  await worker.registerKvCaches({ config: cache, regions });
  await scheduler.setHandshakeMetadata([await worker.handshakeMetadata()]);
  /** One step; returns what has ended. A real engine computes after `startLoad`. */
  const step = () => {
    worker.startLoad(scheduler.buildStepMetadata());
    const output = worker.collectFinished();
    scheduler.applyWorkerOutput(output);
    return output;
  };
  const blocks = (ids) =>
    regions.flatMap(({ memory }) => ids.map((id) => memory.view(id * BLOCK_BYTES, BLOCK_BYTES)));
  return { scheduler, step, blocks, close: () => worker.close().then(() => scheduler.close()) };
}

const [p, d] = [await startEngine("p", "kv_producer"), await startEngine("d", "kv_consumer")];
const tokens = Array.from({ length: 48 }, (_, position) => position);
const prompt = {
  requestId: "r",
  numPromptTokens: 48,
  promptTokenIds: tokens,
  kvTransferParams: {},
};
const atP = { ...prompt, kvTransferParams: { do_remote_decode: true } };
p.scheduler.afterAllocation(atP, [[5, 9, 2]], 0);
for (const [n, block] of p.blocks([5, 9, 2]).entries()) block.fill(n + 1); // P computes the prompt
const { kvTransferParams } = p.scheduler.requestFinished(atP, [[5, 9, 2]], "length");
p.step();
const atD = { ...prompt, kvTransferParams }; // as a proxy hands it to D
d.scheduler.afterAllocation(atD, [[30, 1, 17]], d.scheduler.matchedTokens(atD, 0).tokens);
while (!d.step().finishedReceiving.includes("r")) await sleep(1);
const [sent, received] = [Buffer.concat(p.blocks([5, 9, 2])), Buffer.concat(d.blocks([30, 1, 17]))];
console.log(
  `D has ${received.length} bytes of KV, ${sent.equals(received) ? "equal to P's" : "NOT P's"}`,
);
await Promise.all([d.close(), p.close()]);
