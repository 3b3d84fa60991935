import { platformSuite } from "@kv/conformance/platform";
import { memoryTransport } from "@kv/transport-memory";
import { cpuDevice, neuronCaches, neuronPlatform, simulatedDevice } from "../src/index.js";
import { CONFIG } from "./config.js";

for (const device of [simulatedDevice, cpuDevice]) {
  platformSuite({
    name: `neuron on ${device().maker}`,
    create: neuronPlatform,
    settings: { prefixCaching: false, maxNumSeqs: 1 },
    refusedSettings: [
      { prefixCaching: true, maxNumSeqs: 1 },
      { prefixCaching: false, maxNumSeqs: 2 },
    ],
    async staging() {
      const transport = memoryTransport();
      const made = device();
      return {
        transport,
        caches: neuronCaches({
          device: made,
          config: CONFIG,
          numBlocks: 8,
          numHeads: CONFIG.numKvHeads,
        }),
        wireNames: ["layers.0", "layers.1"],
        async close() {
          await transport.close();
          await made.close();
        },
      };
    },
  });
}
