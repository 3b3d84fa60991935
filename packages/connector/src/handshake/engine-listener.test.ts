import { type SideChannelListenOptions, silentLog } from "@kv/interface";
import { decodeLeaseReply, encodeHandshakePayload, encodeLeaseQuery } from "@kv/protocol";
import { engineIdentity } from "@kv/testing/engine-identity";
import { manualClock } from "@kv/testing/manual-clock";
import { memoryNetwork, memorySideChannel } from "@kv/transport-memory";
import { expect, it } from "vitest";
import { connectorSettings } from "../config/connector-settings.js";
import { readTransferConfig } from "../config/transfer-config.js";
import { EngineListener } from "./engine-listener.js";

/** Opens the listener of a data-parallel rank, and returns what it listens with. */
async function listening({ dpRank = 0, tpSize = 1, port = "5600", extra = {} }) {
  const config = readTransferConfig(
    { kv_connector: "NixlConnector", kv_role: "kv_both", kv_connector_extra_config: extra },
    { env: { VLLM_NIXL_SIDE_CHANNEL_PORT: port, VLLM_NIXL_SIDE_CHANNEL_HOST: "here" } },
  );
  const listens: SideChannelListenOptions[] = [];
  const sideChannel = {
    ...memorySideChannel({ network: memoryNetwork() }),
    async listen(options: SideChannelListenOptions) {
      listens.push(options);
      return { host: options.host, port: options.port, close: async () => {} };
    },
  };
  const listener = new EngineListener({
    ...{ sideChannel, config, clock: manualClock(), log: silentLog, incarnation: "process" },
    settings: connectorSettings(config),
    engine: { ...engineIdentity("e", { tpSize }), dpRank },
    holds: ({ requestId }) => ({ held: requestId === "kept" }),
  });
  const payload = encodeHandshakePayload({
    compatibilityHash: "",
    agentMetadataBytes: new Uint8Array(),
    rest: {},
  });
  await listener.publish([{ tpRank: 0, ppRank: 0, payload }]);
  return listens;
}

it.each([
  [{ dpRank: 0 }, [5600]],
  [{ dpRank: 2, tpSize: 4 }, [5602]],
  [{ dpRank: 2, tpSize: 2, extra: { per_worker_ports: true } }, [5604, 5605]],
  [{ dpRank: 2, tpSize: 2, port: "0", extra: { per_worker_ports: true } }, [0]],
])("%j listens at the host of the config and at the ports %j", async (given, ports) => {
  const listens = await listening(given);
  expect(listens.map(({ host, port }) => [host, port])).toEqual(ports.map((port) => ["here", port]));
});

it.each([
  ["kept", "e", true],
  ["freed", "e", false],
  // Another engine had the address, and a request of that name.
  ["kept", "another", false],
])("a lease query for request %s of engine %s: held is %s", async (requestId, engineId, held) => {
  const [{ answer } = expect.fail("no listener")] = await listening({});
  const query = { requestId, engineId, generation: 1, capability: "c".repeat(22), blocks: "0".repeat(64) };
  const frames = (await answer([encodeLeaseQuery(query)])) ?? [];
  expect(decodeLeaseReply(frames)).toEqual({ incarnation: "process", held });
});
