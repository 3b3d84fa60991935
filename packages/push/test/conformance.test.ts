import { connectorSuite } from "@kv/conformance/connector";
import { memoryPair } from "@kv/testing/scenarios/memory-pair";
import { pushConnector } from "../src/index.js";

for (const tpSize of [1, 2]) {
  connectorSuite({
    name: `push, TP ${tpSize}, memory`,
    createPair: () => memoryPair({ tpSize, connector: pushConnector }),
  });
}
