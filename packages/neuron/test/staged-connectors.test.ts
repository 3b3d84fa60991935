import { connectorSuite } from "@kv/conformance/connector";
import { dualConnector, readTransferConfig, staged } from "@kv/connector";
import type { SchedulerOptions } from "@kv/interface";
import { pullConnector } from "@kv/pull";
import { pushConnector } from "@kv/push";
import { itKeepsUnverifiedKvOutOfTheCache } from "@kv/testing/scenarios/unverified-kv";
import { describe, expect, it } from "vitest";
import { neuronPlatform } from "../src/index.js";
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

it("layer-wise push of a staged cache is rejected with the reason", async () => {
  const module = staged(pushConnector, { platform: neuronPlatform(), poolBlocks: 4 });
  const config = readTransferConfig({
    kv_connector: "NixlPushConnector",
    kv_role: "kv_producer",
    kv_connector_extra_config: { push_layerwise: true },
  });
  await expect(module.createScheduler({ config } as SchedulerOptions)).rejects.toMatchObject({
    code: "KV_PLATFORM_UNSUPPORTED",
    message: expect.stringContaining("after the forward pass") as string,
  });
});
