import { connectorSuite } from "@kv/conformance/connector";
import { folderPair } from "./pair.js";

for (const tpSize of [1, 2])
  connectorSuite({ name: `folder, TP ${tpSize}`, createPair: () => folderPair(tpSize) });
