import { connectorSuite } from "@kv/conformance/connector";
import { dualConnector, readTransferConfig, staged } from "@kv/connector";
import type { SchedulerOptions } from "@kv/interface";
import { pullConnector } from "@kv/pull";
import { pushConnector } from "@kv/push";
import { engineIdentity } from "@kv/testing/engine-identity";
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

it("a staged cache is not read back: refused with the reason", async () => {
  const module = staged(pullConnector, { platform: neuronPlatform(), poolBlocks: 4 });
  const config = readTransferConfig({
    kv_connector: "NixlConnector",
    kv_role: "kv_consumer",
    kv_connector_extra_config: { bidirectional_kv_xfer: true },
  });
  await expect(module.createScheduler({ config } as SchedulerOptions)).rejects.toMatchObject({
    code: "KV_PLATFORM_UNSUPPORTED",
    message: expect.stringContaining("bidirectional_kv_xfer") as string,
  });
});

it("ranks of a staged cache do not share a sequence: refused with the reason", async () => {
  const module = staged(pullConnector, { platform: neuronPlatform(), poolBlocks: 4 });
  const config = readTransferConfig({ kv_connector: "NixlConnector", kv_role: "kv_producer" });
  const engine = engineIdentity("e", { tpSize: 2, dcpSize: 2 });
  await expect(
    module.createScheduler({ config, engine } as SchedulerOptions),
  ).rejects.toMatchObject({
    code: "KV_PLATFORM_UNSUPPORTED",
    message: expect.stringContaining("holds whole sequences") as string,
  });
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
