import { platformSuite } from "@kv/conformance/platform";
import { cpuDevice, neuronPlatform, simulatedDevice } from "../src/index.js";
import { stagingOn } from "./config.js";

for (const device of [simulatedDevice, cpuDevice]) {
  platformSuite({
    name: `neuron on ${device().maker}`,
    create: neuronPlatform,
    settings: { prefixCaching: false, maxNumSeqs: 1 },
    refusedSettings: [
      { prefixCaching: true, maxNumSeqs: 1 },
      { prefixCaching: false, maxNumSeqs: 2 },
    ],
    staging: () => stagingOn(device()),
  });
}
