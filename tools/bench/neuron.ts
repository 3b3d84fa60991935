import type { EngineRanks } from "@kv/conformance/engine/ranks";
import { registerCaches } from "@kv/conformance/engine/sides";
import { staged } from "@kv/connector";
import type { WorkerConnector } from "@kv/interface";
import { neuronCaches, neuronPlatform, simulatedDevice } from "@kv/neuron";
import { simConfig } from "@kv/testing/simulator/sim-config";
import { createSimSides } from "@kv/testing/simulator/sim-sides";
import { memoryNetwork } from "@kv/transport-memory";
import { alone, median, spread } from "./report.js";

const WANTED_IDLE_US = 20;
const IDLE_STEPS = 20_000;
/** 16 layers with 8 heads. */
const CONFIG = {
  ...simConfig(16, 8, 16),
  headSize: 128,
  dtype: "torch.bfloat16",
  attentionBackend: "PLAIN",
};

/** A staged pull connector in steps without work. */
export async function neuron() {
  const network = memoryNetwork();
  const device = simulatedDevice();
  const caches = [neuronCaches({ device, config: CONFIG, numBlocks: 8, numHeads: 8 })];
  const shape = { tpSize: 1, blockSize: 16, numBlocks: 8, cache: CONFIG };
  const sides = await createSimSides(
    {
      ...shape,
      network,
      hostName: "idle",
      engineId: "idle",
      device: ({ connector }) => ({
        connector: staged(connector, { platform: neuronPlatform(), poolBlocks: 9 }),
        ranks: { caches, close() {} } as Partial<EngineRanks> as EngineRanks,
      }),
    },
    network.host("idle"),
  );
  await registerCaches(sides);
  const { scheduler } = sides;
  const [worker] = sides.workers as [WorkerConnector];
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
  for (const each of [sides, device]) await each.close();
  // Wall time includes waiting for a busy machine; processor time does not.
  const what = `an idle step of a staged connector, both sides (processor time ${spread(processorUs, "us")})`;
  const isMet = median(wallUs) <= WANTED_IDLE_US;
  return [alone(what, spread(wallUs, "us"), `<= ${WANTED_IDLE_US} us`, isMet)];
}
