import { connectorSuite } from "@kv/conformance/connector";
import { pullConnector } from "@kv/pull";
import { pushConnector } from "@kv/push";
import { stagedPair } from "./staged-pair.js";

for (const connector of [pullConnector, pushConnector]) {
  for (const tpSize of [1, 2]) {
    connectorSuite({
      name: `${connector.name} with staging, TP ${tpSize}`,
      createPair: () => stagedPair({ connector, tpSize }),
    });
  }
}
