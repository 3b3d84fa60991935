import { connectorSuite } from "@kv/conformance/connector";
import { dualConnector } from "@kv/connector";
import { pullConnector } from "@kv/pull";
import { pushConnector } from "@kv/push";
import { itKeepsUnverifiedKvOutOfTheCache } from "@kv/testing/scenarios/unverified-kv";
import { describe } from "vitest";
import { simNeuron } from "./sim-neuron.js";
import { stagedPair } from "./staged-pair.js";

for (const connector of [pullConnector, pushConnector]) {
  for (const tpSize of [1, 2]) {
    connectorSuite({
      name: `${connector.name} with staging, TP ${tpSize}`,
      createPair: () => stagedPair({ connector, tpSize }),
    });
  }
}

describe("with staging", () => {
  itKeepsUnverifiedKvOutOfTheCache(pullConnector, {
    device: (around) => simNeuron(around, { poolBlocks: 16 }),
  });
});

describe("with pull and push in one engine", () => {
  const both = { name: "auto", pull: pullConnector, push: pushConnector };
  itKeepsUnverifiedKvOutOfTheCache(dualConnector({ ...both, prefer: () => "pull" }));
});
