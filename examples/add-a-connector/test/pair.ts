import { mkdtemp, readdir, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { ConnectorEnd, ConnectorPair } from "@kv/conformance/connector";
import {
  cpuPlatform,
  readTransferConfig,
  registerConnector,
  resolveConnector,
} from "@kv/connector";
import type { KvCacheConfig } from "@kv/interface";
import {
  memoryNetwork,
  memorySideChannel,
  memoryTransport,
  virtualClock,
} from "@kv/transport-memory";

registerConnector("FolderConnector", () => import("../src/index.js"));

const BLOCK_BYTES = 64;
const NUM_BLOCKS = 64;
const cache: KvCacheConfig = {
  groups: [{ kind: "full", layerNames: ["layers.0", "layers.1"] }],
  blockSize: 4,
  physicalBlocksPerLogical: 1,
  numKvHeads: 1,
  headSize: 2,
  numHiddenLayers: 2,
  dtype: "torch.float32",
  cacheDtype: "auto",
  layout: "LBHNC",
  attentionBackend: "NONE",
};
const model = {
  model: "m",
  vllmVersion: "0.33.0",
  connectorVersion: 15,
  isHmaEnabled: false,
  speculativeConfig: null,
};

export async function folderPair(tpSize: number): Promise<ConnectorPair> {
  const folder = await mkdtemp(join(tmpdir(), "kv-folder-"));
  const clock = virtualClock();
  const network = memoryNetwork({ clock });
  const transport = memoryTransport({ network });
  const sideChannel = memorySideChannel({ network });
  const given = {
    kv_connector: "FolderConnector",
    kv_role: "kv_both",
    kv_connector_extra_config: { folder, request_timeout: 10 },
  };
  // Port 0 takes a free one: both engines are on this host.
  const config = readTransferConfig(given, {
    env: { VLLM_NIXL_SIDE_CHANNEL_PORT: "0" },
    extraKeys: ["folder"],
  });
  const module = await resolveConnector(config);
  const ranks = Array.from({ length: tpSize }, (_, tpRank) => tpRank);

  async function end(engineId: string): Promise<ConnectorEnd> {
    const engine = { engineId, tpSize, ppSize: 1, dpRank: 0, model };
    const options = {
      clock,
      config,
      engine,
      cache,
      sideChannel,
      transport,
      platform: cpuPlatform(),
    };
    const region = (layer: number) => {
      const memory = transport.allocate(NUM_BLOCKS * BLOCK_BYTES);
      return {
        name: `layers.${layer}`,
        memory,
        memoryType: memory.memoryType,
        offsetBytes: 0,
        groupId: 0,
        numBlocks: NUM_BLOCKS,
        blockLengthBytes: BLOCK_BYTES,
        blockStrideBytes: BLOCK_BYTES,
      };
    };
    return {
      scheduler: await module.createScheduler(options),
      workers: await Promise.all(
        ranks.map((tpRank) => module.createWorker({ ...options, tpRank, ppRank: 0 })),
      ),
      caches: ranks.map(() => ({ config: cache, regions: [region(0), region(1)] })),
    };
  }

  return {
    prefill: await end("p"),
    decode: await end("d"),
    // Disk access is real and time is virtual: reading the folder lets the disk work before the
    // clock advances.
    async progress() {
      await readdir(folder);
      await clock.advance(2);
    },
    pendingTimers: () => clock.pendingTimers,
    async close() {
      await transport.close();
      await sideChannel.close();
      await rm(folder, { recursive: true });
    },
  };
}
