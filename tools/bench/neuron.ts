import { readTransferConfig, staged } from "@kv/connector";
import { neuronCaches, neuronPlatform, simulatedDevice } from "@kv/neuron";
import { pullConnector } from "@kv/pull";
import { engineIdentity } from "@kv/testing/engine-identity";
import { simConfig } from "@kv/testing/simulator/sim-config";
import { memoryNetwork, memorySideChannel, memoryTransport } from "@kv/transport-memory";
import { alone, median, type Row, spread } from "./report.js";

const WANTED_IDLE_US = 20;
const IDLE_STEPS = 20_000;
/** 16 layers with 8 heads. */
const CONFIG = {
  ...simConfig(16, 8, 16),
  headSize: 128,
  dtype: "torch.bfloat16",
  attentionBackend: "PLAIN",
};

/** Scheduler and worker of a staged pull connector in steps without work. */
export async function neuron(): Promise<Row[]> {
  const network = memoryNetwork();
  const transport = memoryTransport({ network, host: "idle" });
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
    sideChannel: memorySideChannel({ network, host: "idle" }),
    transport,
    platform,
  };
  const worker = await module.createWorker({ ...shared, tpRank: 0, ppRank: 0 });
  await worker.registerKvCaches(
    neuronCaches({ device, config: CONFIG, numBlocks: 8, numHeads: 8 }),
  );
  const scheduler = await module.createScheduler(shared);
  const [wallUs, processorUs]: [number[], number[]] = [[], []];
  for (let round = -1; round < 3; round += 1) {
    const [usage, startMs] = [process.cpuUsage(), performance.now()];
    for (let step = 0; step < IDLE_STEPS; step++) {
      const metadata = scheduler.buildStepMetadata();
      worker.startLoad(metadata);
      await worker.waitForSave(metadata);
      scheduler.applyWorkerOutput(worker.collectFinished());
    }
    const { user, system } = process.cpuUsage(usage);
    if (round < 0) continue;
    wallUs.push(((performance.now() - startMs) * 1000) / IDLE_STEPS);
    processorUs.push((user + system) / IDLE_STEPS);
  }
  for (const each of [worker, scheduler, transport, device]) await each.close();
  // Wall time includes waiting for a busy machine; processor time does not.
  const what = `an idle step of a staged connector, both sides (processor time ${spread(processorUs, "us")})`;
  const isMet = median(wallUs) <= WANTED_IDLE_US;
  return [alone(what, spread(wallUs, "us"), `<= ${WANTED_IDLE_US} us`, isMet)];
}
