import { connectorSuite } from "@kv/conformance/connector";
import { memoryPair } from "@kv/testing/scenarios/memory-pair";

for (const tpSize of [1, 2]) {
  connectorSuite({ name: `pull, TP ${tpSize}, memory`, createPair: () => memoryPair({ tpSize }) });
}
