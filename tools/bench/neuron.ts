// Staging: the cost of an idle step.
import { readTransferConfig, staged } from "@kv/connector";
import type { KvCacheConfig } from "@kv/interface";
import { neuronCaches, neuronPlatform, simulatedDevice } from "@kv/neuron";
import { pullConnector } from "@kv/pull";
import { engineIdentity } from "@kv/testing/engine-identity";
import { memoryNetwork, memorySideChannel, memoryTransport } from "@kv/transport-memory";
import { alone, median, type Row, spread } from "./report.js";

const WANTED_IDLE_US = 20;
const IDLE_STEPS = 20_000;

/** 16 layers with 8 heads. */
const CONFIG: KvCacheConfig = {
  groups: [{ kind: "full", layerNames: Array.from({ length: 16 }, (_, i) => `layers.${i}`) }],
  blockSize: 16,
  physicalBlocksPerLogical: 1,
  numKvHeads: 8,
  headSize: 128,
  numHiddenLayers: 16,
  dtype: "torch.bfloat16",
  cacheDtype: "auto",
  layout: "LBHNC",
  attentionBackend: "PLAIN",
};

/** Scheduler and worker of a staged pull connector in steps without work. */
export async function neuron(): Promise<Row[]> {
  const network = memoryNetwork();
  const transport = memoryTransport({ network, host: "idle" });
  const sideChannel = memorySideChannel({ network, host: "idle" });
  const device = simulatedDevice();
  const platform = neuronPlatform();
  const module = staged(pullConnector, { platform, poolBlocks: 9 });
  const shared = {
    config: {
      ...readTransferConfig({ kv_connector: "NixlConnector", kv_role: "kv_both" }),
      sideChannelHost: "idle",
    },
    engine: engineIdentity("idle"),
    cache: CONFIG,
    sideChannel,
    transport,
    platform,
  };
  const worker = await module.createWorker({ ...shared, tpRank: 0, ppRank: 0 });
  await worker.registerKvCaches(
    neuronCaches({ device, config: CONFIG, numBlocks: 8, numHeads: 8 }),
  );
  const scheduler = await module.createScheduler(shared);
  const steps = async (): Promise<{ wallUs: number; processorUs: number }> => {
    const usage = process.cpuUsage();
    const start = performance.now();
    for (let step = 0; step < IDLE_STEPS; step++) {
      const metadata = scheduler.buildStepMetadata();
      worker.startLoad(metadata);
      await worker.waitForSave(metadata);
      scheduler.applyWorkerOutput(worker.collectFinished());
    }
    const wallUs = ((performance.now() - start) * 1000) / IDLE_STEPS;
    const { user, system } = process.cpuUsage(usage);
    return { wallUs, processorUs: (user + system) / IDLE_STEPS };
  };
  await steps();
  const rounds = [await steps(), await steps(), await steps()];
  const costs = rounds.map(({ wallUs }) => wallUs);
  // Wall time includes waiting for a busy machine; processor time does not.
  const processor = spread(
    rounds.map(({ processorUs }) => processorUs),
    "us",
  );
  await worker.close();
  await scheduler.close();
  await transport.close();
  await device.close();
  const what = `an idle step of a staged connector, both sides (processor time ${processor})`;
  return [
    alone(what, spread(costs, "us"), `<= ${WANTED_IDLE_US} us`, median(costs) <= WANTED_IDLE_US),
  ];
}
