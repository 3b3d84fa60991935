import { createRanks } from "@kv/conformance/engine/ranks";
import { createSides } from "@kv/conformance/engine/sides";
import { cpuPlatform, cudaPlatform, readTransferConfig } from "@kv/connector";
import {
  type AmbientOptions,
  type KvCacheConfig,
  noMetrics,
  type SideChannel,
  silentLog,
} from "@kv/interface";
import {
  decodeHandshakePayload,
  decodeHandshakeRequest,
  encodeHandshakePayload,
} from "@kv/protocol";
import { pullConnector } from "@kv/pull";
import { type MemoryHost, memorySideChannel, memoryTransport } from "@kv/transport-memory";
import { engineIdentity } from "../engine-identity.js";
import { sabotagedSideChannel, sabotagedTransport } from "../faults/sabotage.js";
import type { SimEngineOptions } from "./sim-options.js";
import { simConfig } from "./sim-options.js";

/** The caller registers the caches. */
export async function createSimSides(
  options: Omit<SimEngineOptions, "violation">,
  host: MemoryHost,
) {
  const { network, hostName, engineId, tpSize, ppSize = 1, dcpSize = 1, numBlocks } = options;
  const { memoryType = "DRAM", connector = pullConnector } = options;
  const { clock } = host;
  const ambient: AmbientOptions = {
    clock,
    random: host.random,
    metrics: options.metrics ?? noMetrics,
    log: options.log ?? silentLog,
  };
  const cache: KvCacheConfig = options.cache ?? {
    ...simConfig(options.blockSize, options.numKvHeads, options.numLayers, options.kind),
    layout: options.layout ?? "LBHNC",
    attentionBackend: options.attentionBackend ?? "SIM",
  };
  const given = options.transport ?? memoryTransport({ network, host, memoryTypes: [memoryType] });
  const sabotaged = sabotagedTransport(given, options.sabotage);
  const transport = options.wrapTransport?.(sabotaged) ?? sabotaged;
  const own = options.sideChannel ?? memorySideChannel({ network, host });
  const sideChannel = sabotagedSideChannel(
    options.plain === true ? plainSideChannel(own) : own,
    options.sabotage,
  );
  const config = {
    ...readTransferConfig({
      kv_connector: "NixlConnector",
      kv_role: "kv_both",
      kv_buffer_device: memoryType === "DRAM" ? "cpu" : "cuda",
      enable_permute_local_kv: options.permutesLocalKv ?? false,
      kv_load_failure_policy: options.loadFailurePolicy ?? "fail",
      kv_connector_extra_config: options.extra ?? {},
    }),
    ...(options.sideChannel === undefined
      ? { sideChannelHost: hostName }
      : { sideChannelHost: "127.0.0.1", sideChannelPort: options.sideChannelPort ?? 0 }),
    env: options.env ?? {},
  };
  const engine = engineIdentity(engineId, {
    tpSize,
    ppSize,
    dcpSize,
    model: options.model ?? "sim",
    connectorVersion: options.connectorVersion ?? 15,
    ...(options.hashedAttentionBackend === undefined
      ? {}
      : { hashedAttentionBackend: options.hashedAttentionBackend }),
  });
  const device = options.device?.({
    hostName,
    connector,
    transport,
    clock,
    config: cache,
    tpSize,
    numBlocks,
  });
  const sides = await createSides({
    ...ambient,
    config,
    engine,
    cache,
    transport,
    sideChannel,
    connector: device?.connector ?? connector,
    platform: memoryType === "DRAM" ? cpuPlatform() : cudaPlatform({ gpus: ["nvidia0"] }),
    ranks:
      device?.ranks ??
      createRanks({ transport, config: cache, tpSize, ppSize, dcpSize, numBlocks }),
    staged: device !== undefined,
  });
  return {
    ...sides,
    async bury() {
      if (options.sideChannel !== undefined) await sideChannel.close();
      if (options.transport === undefined) return;
      await transport.close();
      sides.ranks.close();
    },
  };
}

/** As vLLM: only handshakes, without our own fields. */
function plainSideChannel(sideChannel: SideChannel): SideChannel {
  return {
    ...sideChannel,
    listen: (options) =>
      sideChannel.listen({
        ...options,
        async answer(frames) {
          decodeHandshakeRequest(frames);
          const reply = await options.answer(frames);
          const [payload, clock] = reply ?? [];
          if (payload === undefined || clock === undefined) return undefined;
          const { compatibilityHash, agentMetadataBytes, rest } = decodeHandshakePayload(payload);
          return [encodeHandshakePayload({ compatibilityHash, agentMetadataBytes, rest }), clock];
        },
      }),
  };
}
